"""Encode a frame: one batch of a machine with all its GPUs and fields.

The length (u32, little-endian) of a msgpack array (at, period, n, the GPUs' ids, host values), the array, then the
values, fields × GPUs × seconds, as differences in time, i32, byte-shuffled and deflated. It is written at every post,
so it must be fast.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from nodes.telemetry.fields import GPU_FIELDS
from nodes.telemetry.wire import MISSING, Values
from portal.series.codec import Integers

LEVEL = 1
_LENGTH = struct.Struct("<I")


class _FrameHeader(msgspec.Struct, array_like=True):
    at: int
    period: int
    n: int
    gpus: list[int]
    host: dict[str, float]


_header_decoder = msgspec.msgpack.Decoder(_FrameHeader)


@dataclass(frozen=True)
class DecodedFrame:
    """A decoded frame: `values` are fields × GPUs × seconds, `gpus` the rows' ids."""

    at: int
    period: int
    gpus: list[int]
    host: dict[str, float]
    values: Values

    @property
    def seconds(self) -> Integers:
        """Return the Unix second of each sample."""
        return self.at + self.period * np.arange(self.values.shape[2], dtype=np.int64)

    @property
    def until(self) -> int:
        """Return the second after the last one; at least one second long, for the host's values."""
        return self.at + self.period * max(1, int(self.values.shape[2]))


def encode(at: int, period: int, gpus: Sequence[int], host: Mapping[str, float], values: Values) -> bytes:
    header = msgspec.msgpack.encode(_FrameHeader(at, period, values.shape[2], list(gpus), dict(host)))
    steps = values.astype("<i4").reshape(values.shape[0] * values.shape[1], values.shape[2])
    with np.errstate(over="ignore"):
        steps[:, 1:] = np.diff(steps, axis=1)  # wraps around here, and back in the cumulative sum
    shuffled = steps.reshape(-1).view(np.uint8).reshape(-1, 4).T.tobytes() if steps.size else b""
    return b"".join((_LENGTH.pack(len(header)), header, zlib.compress(shuffled, LEVEL)))


def decode(data: bytes) -> DecodedFrame:
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    header = _header_decoder.decode(data[_LENGTH.size : end])
    flat = np.frombuffer(zlib.decompress(data[end:]), np.uint8).reshape(4, -1).T
    steps = np.ascontiguousarray(flat).view("<i4")
    numbers = len(header.gpus) * header.n
    # A frame of an older release may lack the last fields: new ones are added at the end.
    stored = len(steps) // numbers if numbers else len(GPU_FIELDS)
    values = np.full((len(GPU_FIELDS), len(header.gpus), header.n), MISSING, np.int32)
    values[:stored] = np.cumsum(steps.reshape(stored, len(header.gpus), header.n), axis=2, dtype=np.int32)
    return DecodedFrame(header.at, header.period, header.gpus, header.host, values)
