"""Read and write the safetensors format (github.com/huggingface/safetensors, "Format").

A file is eight bytes, a JSON header and the tensors' bytes, which needs no further package; a test reads what is
written with the real one. Tensors are read on request, and written one after the other: a file may be larger than
memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.runtime import data_roots

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HEADER_BYTES = 100 * 2**20
"""The largest header that is read, as in the format's own library."""
MAX_SIZE, MAX_DIMENSIONS = 2**63, 64
"""Limits of torch for sizes and for the number of dimensions."""
ALIGNMENT = 8
"""The header is padded with spaces to a multiple of this many bytes, so that a reader can map what follows."""
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}  # fmt: skip
"""The format's names → torch's names, and bytes per element."""
_NAMES = {ours: name for name, (ours, _) in DTYPES.items()}


class FormatError(ValueError):
    """The file is not in this format, or damaged; the message says how."""


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor in a file."""

    file: Path
    kind: str
    """The format's name of the elements' type."""
    shape: tuple[int, ...]
    begin: int
    """Offset in the file, in bytes."""
    bytes: int

    def read(self) -> Tensor:
        """Return the whole tensor, mapped: parts that are not accessed are not read."""
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.kind][0])
        if not self.bytes:
            return torch.empty(self.shape, dtype=dtype)
        with data_roots.open_file(self.file) as file:
            # Mapped privately, so that nothing can ever be written back.
            name = f"/proc/self/fd/{file.fileno()}"
            mapping = torch.UntypedStorage.from_file(name, False, self.begin + self.bytes)
        content = torch.empty(0, dtype=torch.uint8).set_(mapping)[self.begin :]  # type: ignore[arg-type]
        if self.begin % dtype.itemsize:
            content = content.clone()  # the format allows unaligned tensors, a view does not
        return content.view(dtype).view(self.shape)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the location of each tensor, and the file's metadata. Raises FormatError or OSError."""
    with data_roots.open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, HEADER_BYTES):
            raise FormatError(f"{path} is no safetensors file: it has no header.")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path} is no safetensors file: its header is not JSON ({error}).") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path} is no safetensors file: its header is not a JSON object.")
    metadata = header.pop("__metadata__", None)
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    end = max((stored.begin + stored.bytes for stored in tensors.values()), default=8 + length)
    if end > size:
        raise FormatError(f"{path} ends early: {size:,} bytes of {end:,}. Copy it again.")
    items = metadata.items() if isinstance(metadata, dict) else ()
    return tensors, {str(name): str(value) for name, value in items}


def _stored(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    try:
        low, high = entry["data_offsets"]
        kind, shape = entry["dtype"], tuple(entry["shape"])
        is_valid = all(type(number) is int and 0 <= number < MAX_SIZE for number in (low, high, *shape))
    except (TypeError, KeyError, ValueError):
        raise FormatError(f"{path} is no safetensors file: its header does not say where {name:.200} is.") from None
    if not isinstance(kind, str) or kind not in DTYPES:
        raise FormatError(f"{path} has {name:.200} as {kind!r:.40}, which is an unknown type.")
    if not is_valid:
        raise FormatError(f"{path} is damaged: the offsets or shape of {name:.200} are not whole numbers.")
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"{path} is damaged: {name:.200} has {len(shape):,} dimensions.")
    if high - low != math.prod(shape) * DTYPES[kind][1]:
        message = f"{name:.200} of shape {list(shape)} can't lie in {high - low} bytes of {kind}."
        raise FormatError(f"{path} is damaged: {message}")
    return StoredTensor(path, kind, shape, start + low, high - low)


def can_hold(dtype: torch.dtype) -> bool:
    return _torch_name(dtype) in _NAMES


def write(
    target: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str], read: Callable[[TensorEntry], Tensor]
) -> tuple[int, int]:
    """Write one file, tensor by tensor, which appears complete or not at all. Returns (tensors, their bytes).

    Raises FileExistsError if `target` exists.
    """
    import torch

    tensors = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header, size = _header(tensors, metadata)
    if target.exists():
        raise FileExistsError(f"{target} exists. Remove it, or choose another name.")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(partial, "xb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for entry in tensors:
                file.write(read(entry).contiguous().reshape(-1).view(torch.uint8).numpy().data)  # freed right after
            file.flush()
            os.fsync(file.fileno())
        _put_in_place(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return len(tensors), size


def _put_in_place(partial: Path, target: Path) -> None:
    try:
        os.link(partial, target)  # unlike a rename, it fails if another process was faster
    except FileExistsError:
        raise
    except OSError:  # a file system without links, such as one over an object store
        if os.path.lexists(target):
            raise
        os.rename(partial, target)


def _header(tensors: Sequence[TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Return the header; tensors with the widest elements come first, so that each is aligned to its element size."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in tensors:
        begin, end = end, end + entry.bytes
        kind = _NAMES[_torch_name(entry.dtype)]
        entries[entry.name] = {"dtype": kind, "shape": list(entry.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % ALIGNMENT), end


def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
