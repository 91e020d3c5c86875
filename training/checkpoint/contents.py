"""Read torch's table of contents of a checkpoint, `.metadata`, without trusting its author.

It is a pickle. Only plain classes of torch are resolved for it, as stand-ins: a pickle may also set attributes of a
class that it names, and for `PosixPath`, for example, that would redirect every path in this process. The result is
checked completely, once, so that its readers can rely on it: each chunk lies in a file that the manifest lists, and no
tensor is larger than all files together.
"""

from __future__ import annotations

import math
import os
import pickle
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from training import manifest as manifests
from training.manifest import CheckpointError

NAME = ".metadata"
MAX_BYTES = 2**30
"""The largest file that is read: some 1,000 ranks with 10,000 chunks each."""
_INVALID = f"{NAME} is not a valid table of contents of a checkpoint"


def read_metadata(folder: Path) -> Metadata:
    """Return the table of contents of a checkpoint. Raises CheckpointError if it is invalid or inconsistent."""
    try:
        with open(os.open(folder / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise CheckpointError(f"{_INVALID}: it is not a plain file, or far too large")
            metadata = _Unpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # a foreign pickle may raise anything
        raise CheckpointError(f"{_INVALID}: {' '.join(str(error).split())[:300]}") from error
    _check(metadata, {file.file: file.bytes for file in manifests.read(folder).files})
    return metadata  # type: ignore[no-any-return]


def _check(metadata: Any, files: Mapping[str, int]) -> None:
    if NAME not in files:
        raise CheckpointError(f"{NAME} is not among the files of its manifest")
    try:
        names, locations = metadata.state_dict_metadata, metadata.storage_data
        is_complete = type(metadata) is Metadata and type(names) is dict and type(locations) is dict
        if not is_complete or not all(type(name) is str for name in names):
            raise CheckpointError(_INVALID)
        max_bytes = sum(files.values())
        for name, entry in names.items():
            if not _is_valid_entry(entry, max_bytes):
                raise CheckpointError(f"{_INVALID}: what it says of {name!r:.200} is impossible")
        for index, location in locations.items():
            if type(index) is not MetadataIndex or not _is_valid_location(location, files):
                raise CheckpointError(f"{_INVALID}: {index!r:.200} is in none of the checkpoint's files")
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(_INVALID) from error


def _is_valid_entry(entry: Any, max_bytes: int) -> bool:
    if type(entry) is BytesStorageMetadata:
        return True
    dtype, size = entry.properties.dtype, entry.size
    is_tensor = type(entry) is TensorStorageMetadata and type(entry.properties) is TensorProperties
    if not is_tensor or not isinstance(dtype, torch.dtype) or not _is_size(size) or type(entry.chunks) is not list:
        return False
    return math.prod(size) * dtype.itemsize <= max_bytes and all(_is_chunk(chunk, size) for chunk in entry.chunks)


def _is_chunk(chunk: Any, whole: torch.Size) -> bool:
    if type(chunk) is not ChunkStorageMetadata or not _is_size(chunk.offsets) or not _is_size(chunk.sizes):
        return False
    return len(chunk.offsets) == len(chunk.sizes) == len(whole) and all(
        offset + size <= most for offset, size, most in zip(chunk.offsets, chunk.sizes, whole, strict=True)
    )


def _is_size(size: Any) -> bool:
    return isinstance(size, torch.Size) and all(number >= 0 for number in size)


def _is_valid_location(location: Any, files: Mapping[str, int]) -> bool:
    if (
        type(location) is not _StorageInfo
        or type(location.relative_path) is not str
        or location.relative_path not in files
    ):
        return False
    numbers = (
        type(location.offset) is int and type(location.length) is int and location.offset >= 0 and location.length >= 0
    )
    fits = numbers and location.offset + location.length <= files[location.relative_path]
    return fits and not getattr(location, "transform_descriptors", None)  # we write nothing compressed


class _Unpickler(pickle.Unpickler):
    """Unpickles what torch writes into `.metadata`, and no code that somebody else may have put there."""

    CALLABLES: Mapping[tuple[str, str], Callable[..., Any]] = {
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _get_layout,
        ("pathlib", "PosixPath"): os.path.join,
        ("pathlib._local", "PosixPath"): os.path.join,
        (of_torch.__name__, "_MEM_FORMAT_ENCODING"): of_torch._MEM_FORMAT_ENCODING,
    }
    """Functions that may be called. Paths, which are not used, become strings."""
    CLASSES: Mapping[tuple[str, str], type] = {
        (kind.__module__, kind.__name__): kind
        for kind in (
            *(Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, TensorProperties),
            *(MetadataIndex, of_torch.StorageMeta, _StorageInfo),
        )
    }

    def find_class(self, module: str, name: str) -> Any:
        if (function := self.CALLABLES.get((module, name))) is not None:
            return lambda *arguments: function(*arguments)
        if (kind := self.CLASSES.get((module, name))) is not None:
            return _stand_in(kind)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module!r:.100} {name!r:.100}, which is not allowed there")


def _stand_in(kind: type) -> type:
    """Return a class whose instances are those of `kind`, so that changes to the class itself affect nobody."""

    def new(cls: type, *arguments: object) -> Any:
        return object.__new__(kind)

    return type(kind.__name__, (), {"__new__": new})
