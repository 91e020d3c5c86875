"""Write and read tensors of a checkpoint's folder through torch.distributed.checkpoint, hashing while writing.

Imported only when a checkpoint is written or read: the import takes most of a second, which the first step need not
wait for.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from training.checkpoint.contents import read_metadata
from training.checkpoint.rows import FrozenRows
from training.checkpoint.staging import KeyPath, State, tree, walk
from training.manifest import CheckpointError, CheckpointFile

OPTIONAL = "comm."
"""Prefix of state that may be missing or of another layout, and then starts from scratch: that of communication."""


class WriteFailed(OSError):
    """Some rank could not write its part; the message says which and why."""


def write(state: State, folder: Path, group: dist.ProcessGroup | None) -> list[CheckpointFile]:
    """Write this rank's part of the state; all ranks of the group call it. Returns the files it wrote, fsynced."""
    # Nothing is copied ahead, as all of it is in main memory. Otherwise, with a GPU, torch would wait every 10 MB for
    # this thread's stream, which is also training's: for everything that is queued there.
    writer = FileSystemWriter(folder, sync_files=True, overwrite=False, per_thread_copy_ahead=0)
    files = writer.fs = _Digesting()
    try:
        save(_in_blocks(state), storage_writer=writer, planner=_BlockPlanner(), process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise WriteFailed(f"rank {rank}: {cause}") from error
    return files.written()


def read(state: State, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Read a checkpoint into the state's own tensors, whatever their layout; all ranks of the group call it."""
    try:
        load(state, storage_reader=_StorageReader(folder), planner=_OnlyTensors(), process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"rank {rank}: {cause}") from error


def match_stored(state: State, folder: Path) -> State:
    """Return those tensors of this rank's state that the checkpoint has.

    Raises CheckpointError if a required tensor is missing or has another shape.
    """
    stored = stored_tensors(folder)
    matched: dict[KeyPath, torch.Tensor] = {}
    for path, tensor in walk(state):
        name = ".".join(path)
        entry = stored.get(name)
        if entry is not None and entry.size == tensor.shape:
            matched[path] = tensor
        elif name.startswith(OPTIONAL):
            continue
        elif entry is None:
            raise CheckpointError(f"it has no {name}, which this run's model needs: another model was saved")
        else:
            raise CheckpointError(
                f"{name} has shape {_shape(entry.size)} in it, but {_shape(tensor.shape)} in this run's model"
            )
    return tree(matched)


def names(state: State) -> set[str]:
    return {".".join(path) for path, _ in walk(state)}


def check_complete(folder: Path, wanted: set[str]) -> None:
    """Raise CheckpointError if the checkpoint has a tensor that no rank's state contains."""
    for name in sorted(stored_tensors(folder)):
        if name not in wanted and not name.startswith(OPTIONAL):
            raise CheckpointError(f"it has {name}, which this run's model does not have: another model was saved")


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return every tensor in a checkpoint by its dotted name: its whole shape, its dtype, and its chunks."""
    metadata = read_metadata(folder)
    return {
        name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }


def _shape(size: Iterable[int]) -> str:
    return f"[{', '.join(map(str, size))}]"


def _in_blocks(state: State) -> State:
    return tree({path: _Blocks(leaf) if isinstance(leaf, FrozenRows) else leaf for path, leaf in walk(state)})


class _Blocks:
    """Frozen rows in the form that torch's planner writes: one chunk per block, copied when its turn comes."""

    def __init__(self, frozen: FrozenRows) -> None:
        self._frozen = frozen
        self._properties = TensorProperties.create_from_tensor(frozen.tensor)
        self._blocks = {self._offset(block): block for block in frozen.blocks()}

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        shape = self._frozen.shape
        return [
            WriteItem(
                index=MetadataIndex(name, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offset, torch.Size((len(block), *shape[1:]))),
                    properties=self._properties,
                    size=shape,
                ),
            )
            for offset, block in self._blocks.items()
        ]

    def take(self, offset: torch.Size) -> torch.Tensor:
        return self._frozen.take(self._blocks[offset])

    def _offset(self, block: range) -> torch.Size:
        return torch.Size((self._frozen.first + block.start, *[0] * (len(self._frozen.shape) - 1)))


class _BlockPlanner(DefaultSavePlanner):
    """torch's planner, extended to chunks of `_Blocks`; it finds chunks in tensors only."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        leaf = self.state_dict[index.fqn]
        if isinstance(leaf, _Blocks) and index.offset is not None:
            return leaf.take(index.offset)
        return super().lookup_object(index)


class _StorageReader(FileSystemReader):
    """torch's reader, with our own unpickling."""

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _OnlyTensors(DefaultLoadPlanner):
    """Refuses objects that are not tensors: torch's planner would unpickle them, with all that a pickle can do."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is not a tensor in it")


class _Digesting(FileSystem):
    """torch's file system, which also hashes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[str, _Stream] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IO[bytes]]:  # type: ignore[override]
        if mode != "wb":
            raise ValueError(f"a checkpoint is only written here, not opened as {mode}")
        with open(path, "xb", buffering=1 << 20) as file:
            stream = self._files[os.path.basename(path)] = _Stream(file)
            yield stream  # type: ignore[misc]

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._files[os.path.basename(new_path)] = self._files.pop(os.path.basename(path))

    def written(self) -> list[CheckpointFile]:
        return [CheckpointFile(name, stream.size, stream.digest.hexdigest()) for name, stream in self._files.items()]


class _Stream(io.RawIOBase):
    """An append-only stream: a digest computed while writing would be wrong after seeking back."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        written = self._file.write(data)
        self.digest.update(data)
        self.size += written
        return written

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        self._file.flush()
        return self._file.fileno()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False
