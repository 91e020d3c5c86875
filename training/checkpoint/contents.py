"""torch's table of contents of a checkpoint, `.metadata`, read without trust in who wrote it.

It is a pickle. Of what it names it gets nothing but plain classes of torch's, and those as stand-ins: a pickle may
also set attributes of a class that it names, and of `PosixPath`, say, that would be where every file of this process
lies. What comes of it is looked at whole, once, so that whoever reads it may take it at its word: each chunk lies in a
file that the manifest lists, and no tensor is larger than all of them.
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
MOST_BYTES = 2**30
"""The largest that is read: some 1,000 ranks with 10,000 chunks each."""
_NO_CONTENTS = f"{NAME} is no table of contents of a checkpoint"


def read_metadata(folder: Path) -> Metadata:
    """The table of contents of a checkpoint; CheckpointError if it is none, or says what can't be."""
    try:
        with open(os.open(folder / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
                raise CheckpointError(f"{_NO_CONTENTS}: it is no plain file, or far too large")
            found = _Unpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # there is no telling what a pickle of somebody else's ends in
        raise CheckpointError(f"{_NO_CONTENTS}: {' '.join(str(error).split())[:300]}") from error
    _check(found, {file.file: file.bytes for file in manifests.read(folder).files})
    return found  # type: ignore[no-any-return]


def _check(found: Any, files: Mapping[str, int]) -> None:
    if NAME not in files:
        raise CheckpointError(f"{NAME} is not among the files of its manifest")
    try:
        names, places = found.state_dict_metadata, found.storage_data
        whole = type(found) is Metadata and type(names) is dict and type(places) is dict
        if not whole or not all(type(name) is str for name in names):
            raise CheckpointError(_NO_CONTENTS)
        most_bytes = sum(files.values())
        for name, about in names.items():
            if not _is_stored(about, most_bytes):
                raise CheckpointError(f"{_NO_CONTENTS}: what it says of {name!r:.200} can't be")
        for index, place in places.items():
            if type(index) is not MetadataIndex or not _is_place(place, files):
                raise CheckpointError(f"{_NO_CONTENTS}: {index!r:.200} lies in no file of the checkpoint")
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(_NO_CONTENTS) from error


def _is_stored(about: Any, most_bytes: int) -> bool:
    if type(about) is BytesStorageMetadata:
        return True
    dtype, size = about.properties.dtype, about.size
    whole = type(about) is TensorStorageMetadata and type(about.properties) is TensorProperties
    if not whole or not isinstance(dtype, torch.dtype) or not _is_size(size) or type(about.chunks) is not list:
        return False
    return math.prod(size) * dtype.itemsize <= most_bytes and all(_is_chunk(chunk, size) for chunk in about.chunks)


def _is_chunk(chunk: Any, whole: torch.Size) -> bool:
    if type(chunk) is not ChunkStorageMetadata or not _is_size(chunk.offsets) or not _is_size(chunk.sizes):
        return False
    return len(chunk.offsets) == len(chunk.sizes) == len(whole) and all(
        offset + size <= most for offset, size, most in zip(chunk.offsets, chunk.sizes, whole, strict=True)
    )


def _is_size(size: Any) -> bool:
    return isinstance(size, torch.Size) and all(number >= 0 for number in size)


def _is_place(place: Any, files: Mapping[str, int]) -> bool:
    if type(place) is not _StorageInfo or type(place.relative_path) is not str or place.relative_path not in files:
        return False
    numbers = type(place.offset) is int and type(place.length) is int and place.offset >= 0 and place.length >= 0
    fits = numbers and place.offset + place.length <= files[place.relative_path]
    return fits and not getattr(place, "transform_descriptors", None)  # nothing of ours is packed


class _Unpickler(pickle.Unpickler):
    """Takes what torch writes into `.metadata`, and no code that somebody else may have put there."""

    MADE: Mapping[tuple[str, str], Callable[..., Any]] = {
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _get_layout,
        ("pathlib", "PosixPath"): os.path.join,
        ("pathlib._local", "PosixPath"): os.path.join,
        (of_torch.__name__, "_MEM_FORMAT_ENCODING"): of_torch._MEM_FORMAT_ENCODING,
    }
    """What is called. A path, of which nothing is read, is a text here."""
    CLASSES: Mapping[tuple[str, str], type] = {
        (kind.__module__, kind.__name__): kind
        for kind in (
            *(Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, TensorProperties),
            *(MetadataIndex, of_torch.StorageMeta, _StorageInfo),
        )
    }

    def find_class(self, module: str, name: str) -> Any:
        if (made := self.MADE.get((module, name))) is not None:
            return lambda *arguments: made(*arguments)
        if (kind := self.CLASSES.get((module, name))) is not None:
            return _stand_in(kind)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module!r:.100} {name!r:.100}, which has no business there")


def _stand_in(kind: type) -> type:
    """A class of which instances are made as of this one; what is done to itself is done to nobody."""

    def new(cls: type, *arguments: object) -> Any:
        return object.__new__(kind)

    return type(kind.__name__, (), {"__new__": new})
