"""Tensors to and from a checkpoint's folder through torch.distributed.checkpoint, digests taken while writing.

Imported only when a checkpoint is written or read: the import takes most of a second, which the first step need not
wait for.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from training.manifest import File

State = dict[str, Any]
"""A tree of dicts with tensors as leaves."""


def write(state: State, folder: Path, group: dist.ProcessGroup | None) -> list[File]:
    """Writes this rank's part of the state; all ranks of the group call it. Answers what this rank wrote, fsynced."""
    writer = FileSystemWriter(folder, sync_files=True, overwrite=False)
    files = writer.fs = _Digesting()
    save(state, storage_writer=writer, process_group=group)
    return files.written()


def read(state: State, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Reads a checkpoint into the state's own tensors, however they are laid out; all ranks of the group call it."""
    load(state, storage_reader=FileSystemReader(folder), process_group=group)


class _Digesting(FileSystem):
    """torch's file system, but what is written is hashed on its way."""

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

    def written(self) -> list[File]:
        return [File(name, stream.size, stream.digest.hexdigest()) for name, stream in self._files.items()]


class _Stream(io.RawIOBase):
    """Append only: a digest taken on the way is of no use once somebody has gone back."""

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
