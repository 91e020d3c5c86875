"""Sizes of the messages between server and clients, and their form as bytes.

Nothing sends these messages yet. The one transport there is, `ranks`, exchanges tensors between the ranks of a job; the
traffic of a federation is simulated as the exact size of what `encode` would write. `encode` and `decode` define that
form, for a transport to clients outside the job:

    length of the header (4 bytes) · header (JSON) · tensor · tensor · …

The header names the round, the sender and every tensor with its shape and dtype, and has a digest of what follows.
There is no pickle: a message is numbers of known shapes, or refused.
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
"""Maximum size of a header, which is read before the sender is known."""
QUOTED_CHARS = 60
_LENGTH = struct.Struct("<I")
_DIGEST = "0" * 64
_KEYS = ["round", "client", "samples", "sha256", "tensors"]

ShapeAndDtype = tuple[tuple[int, ...], torch.dtype]


class MessageError(ValueError):
    """Raised for bytes that are not the expected message; says what differs."""


@dataclass(frozen=True)
class Message:
    """A decoded message."""

    tensors: dict[str, Tensor]
    samples: int | None
    """The number of training samples that the client reports; None for a message of the server."""


@dataclass(frozen=True)
class MessageLayout:
    """The tensors of a kind of message by name, in the order in which they are sent."""

    tensors: Mapping[str, ShapeAndDtype]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> MessageLayout:
        return cls({name: (tuple(value.shape), value.dtype) for name, value in tensors.items()})

    def encode(self, tensors: Mapping[str, Tensor], *, round_: int, client: int | None, samples: int | None) -> bytes:
        """Return a message as bytes. `client`: its sender; None for the server, which has no samples.

        MessageError if the tensors are not those of this layout.
        """
        if (found := MessageLayout.of(tensors).tensors) != dict(self.tensors) or list(found) != list(self.tensors):
            raise MessageError(_difference(_tensor_entries(found), _tensor_entries(self.tensors)))
        bodies = [_memory(value) for value in tensors.values()]
        digest = hashlib.sha256()
        for body in bodies:
            digest.update(body)
        header = self._header(round_, client, samples, digest.hexdigest())
        if len(header) > HEADER_BYTES:
            raise MessageError(f"its header has {len(header):,} bytes, more than {HEADER_BYTES:,}: too many tensors")
        return b"".join([_LENGTH.pack(len(header)), header, *bodies])

    def size(self, *, round_: int, client: int | None, samples: int | None) -> int:
        """Return the number of bytes that `encode` would write."""
        return _LENGTH.size + len(self._header(round_, client, samples, _DIGEST)) + self.body

    def sizes(self, round_: int, clients: Sequence[int], samples: Sequence[int]) -> NDArray[np.int64]:
        """Return the size of each client's message, (clients,). Only the digits of the header's numbers differ."""
        base = self.size(round_=round_, client=0, samples=0)
        more = [len(f"{client}{count}") - 2 for client, count in zip(clients, samples, strict=True)]
        return base + np.array(more, dtype=np.int64)

    @property
    def body(self) -> int:
        """Return the number of bytes of the tensors, without the header."""
        return sum(_bytes(shaped) for shaped in self.tensors.values())

    def decode(self, data: bytes | memoryview, *, round_: int, client: int | None, samples: int | None) -> Message:
        """Decode a message of this round from this client; MessageError for any other bytes.

        `samples`: the client's number of samples, which it may not exceed. Memory is allocated only for bytes that
        came.
        """
        data = memoryview(data).cast("B")
        header, begin = _read_header(data)
        _check_sender(header, round_, client, samples)
        if header["tensors"] != (expected := _tensor_entries(self.tensors)):
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
        header = {
            "round": round_,
            "client": client,
            "samples": samples,
            "sha256": digest,
            "tensors": _tensor_entries(self.tensors),
        }
        return json.dumps(header, separators=(",", ":")).encode()


@dataclass(frozen=True)
class MessagePair:
    """The layouts of the messages to a client and from it."""

    up: MessageLayout
    down: MessageLayout

    def traffic(
        self, round_: int, clients: NDArray[np.int64], samples: NDArray[np.int64], *, has_answered: NDArray[np.bool_]
    ) -> Traffic:
        """Return the traffic of one task: messages to these clients, and from those that answered."""
        up = np.where(has_answered, self.up.sizes(round_, clients.tolist(), samples.tolist()), 0)
        down = self.down.size(round_=round_, client=None, samples=None)
        return Traffic(clients, up, np.full(len(clients), down, dtype=np.int64))


@dataclass(frozen=True)
class Traffic:
    """The bytes of a round's messages by client, in both directions."""

    clients: NDArray[np.int64]
    up: NDArray[np.int64]
    down: NDArray[np.int64]

    @classmethod
    def empty(cls) -> Traffic:
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


def _tensor_entries(tensors: Mapping[str, ShapeAndDtype]) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        for name, (shape, dtype) in tensors.items()
    ]


def _bytes(shaped: ShapeAndDtype) -> int:
    shape, dtype = shaped
    return math.prod(shape) * dtype.itemsize


def _memory(value: Tensor) -> bytes:
    written: bytes = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return written


# Parse untrusted headers: every value may be anything until it is checked.


def _read_header(data: memoryview) -> tuple[dict[str, Any], int]:
    """Return the header, and the offset of the tensors."""
    if len(data) < _LENGTH.size:
        raise MessageError(f"has {len(data)} bytes, too few for a message")
    (length,) = _LENGTH.unpack_from(data)
    if length > min(HEADER_BYTES, len(data) - _LENGTH.size):
        raise MessageError(f"claims a header of {length:,} bytes; it must be complete and at most {HEADER_BYTES:,}")
    end = _LENGTH.size + length
    try:
        header = json.loads(bytes(data[_LENGTH.size : end]).decode())
    except (ValueError, RecursionError):
        raise MessageError("its header is not JSON") from None
    if not isinstance(header, dict) or sorted(header) != sorted(_KEYS):
        raise MessageError(f"its header must contain exactly {', '.join(_KEYS)}")
    return header, end


def _check_sender(header: Mapping[str, Any], round_: int, client: int | None, samples: int | None) -> None:
    for key, expected in (("round", round_), ("client", client)):
        if not _is_exactly(header[key], expected):
            raise MessageError(f"is for {key} {_quoted(header[key])}, not {expected}")
    claimed = header["samples"]
    if samples is None or claimed is None:
        if claimed is not samples:
            raise MessageError(f"claims {_quoted(claimed)} samples, not {samples}")
    elif type(claimed) is not int or claimed < 1:
        raise MessageError(f"claims {_quoted(claimed)} samples; a whole number of at least 1 is expected")
    elif claimed > samples:
        raise MessageError(f"claims {_quoted(claimed)} samples; its client has {samples:,}")


def _difference(found: Any, expected: list[dict[str, Any]]) -> str:
    """Describe the first difference between the tensors of a message and those that were expected."""
    if not isinstance(found, list) or any(not isinstance(entry, dict) or "name" not in entry for entry in found):
        return "does not name its tensors"
    names, wanted = [entry["name"] for entry in found], [entry["name"] for entry in expected]
    if missing := [name for name in wanted if name not in names]:
        return f"has no tensor {_quoted(missing[0])}"
    if unexpected := [name for name in names if name not in wanted]:
        return f"has a tensor {_quoted(unexpected[0])}, which was not requested"
    for entry, expected_entry in zip(found, expected, strict=False):
        for key in ("name", "shape", "dtype"):
            if not _is_exactly(entry.get(key), expected_entry[key]):
                what = f"tensor {_quoted(expected_entry['name'])}: its {key}"
                return f"{what} is {_quoted(entry.get(key))}, not {_quoted(expected_entry[key])}"
    return "names its tensors differently than requested"


def _is_exactly(found: Any, expected: Any) -> bool:
    return type(found) is type(expected) and found == expected


def _quoted(value: Any) -> str:
    """Return an untrusted value as JSON, cut to the length of a line."""
    try:
        return json.dumps(value)[:QUOTED_CHARS]
    except RecursionError:
        return "something nested"
