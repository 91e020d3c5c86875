"""What travels between server and clients, as the bytes that would be sent: a header, then the tensors' own memory.

    length of the header (4 bytes) · header (JSON) · tensor · tensor · …

The header names round, sender and every tensor with shape and dtype, and has a digest of what follows. No pickle: what
comes from outside is numbers of known shapes or nothing. Sizes are counted by the same code.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HEADER_BYTES = 64 * 1024
_LENGTH = struct.Struct("<I")
_DIGEST = "0" * 64


@dataclass(frozen=True)
class Sizes:
    """Bytes of one message each way."""

    up: int
    down: int


def encode(tensors: Mapping[str, Tensor], *, round_: int, client: int | None, samples: int | None) -> bytes:
    """`client`: who sends it; None: the server."""
    bodies = [value.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes() for value in tensors.values()]
    digest = hashlib.sha256()
    for body in bodies:
        digest.update(body)
    about = [(name, list(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in tensors.items()]
    header = _header(about, round_=round_, client=client, samples=samples, digest=digest.hexdigest())
    return b"".join([_LENGTH.pack(len(header)), header, *bodies])


def size(
    about: Sequence[tuple[str, Sequence[int], str]], *, round_: int, client: int | None, samples: int | None
) -> int:
    """What `encode` would make of tensors of these names, shapes and dtypes, without making it."""
    header = _header(
        [(n, list(s), d) for n, s, d in about], round_=round_, client=client, samples=samples, digest=_DIGEST
    )
    numbers: int = sum(_numbers(shape) * getattr(torch, dtype).itemsize for _, shape, dtype in about)
    return _LENGTH.size + len(header) + numbers


def _header(
    about: Sequence[tuple[str, list[int], str]], *, round_: int, client: int | None, samples: int | None, digest: str
) -> bytes:
    tensors = [{"name": name, "shape": shape, "dtype": dtype} for name, shape, dtype in about]
    told = {"round": round_, "client": client, "samples": samples, "sha256": digest, "tensors": tensors}
    return json.dumps(told, separators=(",", ":")).encode()


def _numbers(shape: Sequence[int]) -> int:
    found = 1
    for one in shape:
        found *= one
    return found
