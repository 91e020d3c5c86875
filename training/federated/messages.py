"""What travels between server and clients, as the bytes that are sent: a header, then the tensors' own memory.

    length of the header (4 bytes) · header (JSON) · tensor · tensor · …

The header names round, sender and every tensor with shape and dtype, and has a digest of what follows. No pickle: what
comes from outside is numbers of known shapes or nothing. What is counted is what `encode` would write, to the byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HEADER_BYTES = 64 * 1024
"""Of a header at most: it is read before anything is known of who sent it."""
QUOTED_LETTERS = 60
_LENGTH = struct.Struct("<I")
_DIGEST = "0" * 64
_KEYS = ["round", "client", "samples", "sha256", "tensors"]

Shaped = tuple[tuple[int, ...], torch.dtype]


class MessageError(ValueError):
    """These bytes are not the message that was asked for; says in which way."""


@dataclass(frozen=True)
class Message:
    """What was in one."""

    tensors: dict[str, Tensor]
    samples: int | None
    """That its sender says it has; None: the server's."""


@dataclass(frozen=True)
class Description:
    """One kind of message: its tensors by name, in the order in which they are sent."""

    tensors: Mapping[str, Shaped]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Description:
        return cls({name: (tuple(value.shape), value.dtype) for name, value in tensors.items()})

    def encode(self, tensors: Mapping[str, Tensor], *, round_: int, client: int | None, samples: int | None) -> bytes:
        """`client`: who sends it; None: the server, which has no samples."""
        if (found := Description.of(tensors).tensors) != dict(self.tensors) or list(found) != list(self.tensors):
            raise MessageError(_difference(_told(found), _told(self.tensors)))
        bodies = [_memory(value) for value in tensors.values()]
        digest = hashlib.sha256()
        for body in bodies:
            digest.update(body)
        header = self._header(round_, client, samples, digest.hexdigest())
        if len(header) > HEADER_BYTES:
            raise MessageError(f"its header has {len(header):,} bytes, more than {HEADER_BYTES:,}: too many tensors")
        return b"".join([_LENGTH.pack(len(header)), header, *bodies])

    def size(self, *, round_: int, client: int | None, samples: int | None) -> int:
        """Bytes that `encode` would write."""
        return _LENGTH.size + len(self._header(round_, client, samples, _DIGEST)) + self.body

    def sizes(self, round_: int, clients: Sequence[int], samples: Sequence[int]) -> NDArray[np.int64]:
        """(clients,): of each one's own message. Of the header only the digits of its numbers differ."""
        base = self.size(round_=round_, client=0, samples=0)
        more = [len(f"{client}{count}") - 2 for client, count in zip(clients, samples, strict=True)]
        return base + np.array(more, dtype=np.int64)

    @property
    def body(self) -> int:
        """Bytes of the tensors alone."""
        return sum(_bytes(shaped) for shaped in self.tensors.values())

    def decode(self, data: bytes | memoryview, *, round_: int, client: int | None, samples: int | None) -> Message:
        """What is in a message of this round from this client; MessageError for any other bytes.

        `samples`: that the client has; it may not claim more. Nothing is made room for that did not come.
        """
        data = memoryview(data).cast("B")
        header, begin = _read_header(data)
        _check_sender(header, round_, client, samples)
        if header["tensors"] != (expected := _told(self.tensors)):
            raise MessageError(_difference(header["tensors"], expected))
        if len(data) - begin != self.body:
            raise MessageError(f"has {len(data) - begin:,} bytes of tensors, not {self.body:,}")
        if hashlib.sha256(data[begin:]).hexdigest() != header["sha256"]:
            raise MessageError("its digest is that of other bytes: they were changed on the way")
        return Message(self._tensors(data, begin), header["samples"])

    def _tensors(self, data: memoryview, begin: int) -> dict[str, Tensor]:
        found = {}
        for name, (shape, dtype) in self.tensors.items():
            end = begin + _bytes((shape, dtype))
            copied = torch.from_numpy(np.frombuffer(data[begin:end], dtype=np.uint8).copy())
            found[name], begin = copied.view(dtype).reshape(shape), end
        return found

    def _header(self, round_: int, client: int | None, samples: int | None, digest: str) -> bytes:
        told = {
            "round": round_,
            "client": client,
            "samples": samples,
            "sha256": digest,
            "tensors": _told(self.tensors),
        }
        return json.dumps(told, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Messages:
    """Of a federation, each way."""

    up: Description
    down: Description

    def traffic(
        self, round_: int, clients: NDArray[np.int64], samples: NDArray[np.int64], *, did_answer: NDArray[np.bool_]
    ) -> Traffic:
        """Of one question to these clients, and the answers of those that gave one."""
        up = np.where(did_answer, self.up.sizes(round_, clients.tolist(), samples.tolist()), 0)
        down = self.down.size(round_=round_, client=None, samples=None)
        return Traffic(clients, up, np.full(len(clients), down, dtype=np.int64))


@dataclass(frozen=True)
class Traffic:
    """Bytes of the messages of a round, both ways, by client."""

    clients: NDArray[np.int64]
    up: NDArray[np.int64]
    down: NDArray[np.int64]

    @classmethod
    def none(cls) -> Traffic:
        nothing = np.zeros(0, dtype=np.int64)
        return cls(nothing, nothing, nothing)

    @property
    def bytes_up(self) -> int:
        return int(self.up.sum())

    @property
    def bytes_down(self) -> int:
        return int(self.down.sum())

    def __add__(self, other: Traffic) -> Traffic:
        clients = np.union1d(self.clients, other.clients)
        up, down = np.zeros((2, len(clients)), dtype=np.int64)
        for part in (self, other):
            where = np.searchsorted(clients, part.clients)
            up[where] += part.up
            down[where] += part.down
        return Traffic(clients, up, down)


def _told(tensors: Mapping[str, Shaped]) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        for name, (shape, dtype) in tensors.items()
    ]


def _bytes(shaped: Shaped) -> int:
    shape, dtype = shaped
    return math.prod(shape) * dtype.itemsize


def _memory(value: Tensor) -> bytes:
    written: bytes = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return written


# Reading what others wrote: every value is taken for anything until it was looked at.


def _read_header(data: memoryview) -> tuple[dict[str, Any], int]:
    """The header, and where what follows begins."""
    if len(data) < _LENGTH.size:
        raise MessageError(f"has {len(data)} bytes, too few for a message")
    (length,) = _LENGTH.unpack_from(data)
    if length > min(HEADER_BYTES, len(data) - _LENGTH.size):
        raise MessageError(
            f"says that its header has {length:,} bytes; at most {HEADER_BYTES:,}, and all must be there"
        )
    end = _LENGTH.size + length
    try:
        header = json.loads(bytes(data[_LENGTH.size : end]).decode())
    except (ValueError, RecursionError):
        raise MessageError("its header is not JSON") from None
    if not isinstance(header, dict) or sorted(header) != sorted(_KEYS):
        raise MessageError(f"its header must hold {', '.join(_KEYS)}, and nothing else")
    return header, end


def _check_sender(header: Mapping[str, Any], round_: int, client: int | None, samples: int | None) -> None:
    for key, expected in (("round", round_), ("client", client)):
        if not _is(header[key], expected):
            raise MessageError(f"is of {key} {_quoted(header[key])}, not {expected}")
    claimed = header["samples"]
    if samples is None or claimed is None:
        if claimed is not samples:
            raise MessageError(f"says that its sender has {_quoted(claimed)} samples, not {samples}")
    elif type(claimed) is not int or claimed < 1:
        raise MessageError(f"says that its sender has {_quoted(claimed)} samples; a whole number from 1 is wanted")
    elif claimed > samples:
        raise MessageError(f"says that its sender has {_quoted(claimed)} samples; it has {samples:,}")


def _difference(found: Any, expected: list[dict[str, Any]]) -> str:
    """In which way the tensors that a message names are not those that were asked for."""
    if not isinstance(found, list) or any(not isinstance(one, dict) or "name" not in one for one in found):
        return "does not name its tensors"
    names, wanted = [one["name"] for one in found], [one["name"] for one in expected]
    if lacking := [name for name in wanted if name not in names]:
        return f"has no tensor {_quoted(lacking[0])}"
    if strange := [name for name in names if name not in wanted]:
        return f"has a tensor {_quoted(strange[0])}, which was not asked for"
    for one, other in zip(found, expected, strict=False):
        for key in ("name", "shape", "dtype"):
            if not _is(one.get(key), other[key]):
                what = f"tensor {_quoted(other['name'])}: its {key}"
                return f"{what} is {_quoted(one.get(key))}, not {_quoted(other[key])}"
    return "names its tensors in another way than was asked for"


def _is(found: Any, expected: Any) -> bool:
    return type(found) is type(expected) and found == expected


def _quoted(value: Any) -> str:
    """What somebody wrote, as much of it as a line has room for."""
    try:
        return json.dumps(value)[:QUOTED_LETTERS]
    except RecursionError:
        return "something nested"
