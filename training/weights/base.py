"""The frozen weights that adapters belong to: the weights that a run started from, copied once into its own folder.

    job/base/model.safetensors, config.json, …      copied unchanged by the run's first start
    job/base/BASE                                   JSON: each file with its size and sha256; written last

Checkpoints of such a run contain adapters only, and the digest of BASE. So a run can resume even if the folder that it
was started from is gone or has changed, and a base that does not match a checkpoint is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from training.attempt.files import write_json
from training.corpus.errors import DataError
from training.manifest import CheckpointError
from training.runtime import data_roots
from training.weights.weight_files import SINGLE, open_weights, weights_error

FOLDER, LIST = "base", "BASE"
CHUNK_BYTES = 16 * 2**20


class BaseWeights:
    """The copy of the base weights. Checkpoints store its digest."""

    def __init__(self, job_dir: Path) -> None:
        self.path = job_dir / FOLDER

    @property
    def is_copied(self) -> bool:
        return (self.path / LIST).exists()

    def copy(self, weights: Path, on_progress: Callable[[], None] = lambda: None) -> None:
        """Copy the weights unless they are here; `on_progress` is called every few megabytes. One process calls it.

        Raises DataError if that fails, or if other weights have been copied before.
        """
        if self.is_copied:
            if (before := self._read_list().get("from")) != str(weights):
                raise weights_error(
                    f"is {weights}, but this run's adapters belong to {before}. Use another run directory."
                )
            return
        try:
            self.path.mkdir(exist_ok=True)
            for leftover in self.path.iterdir():  # left by an interrupted copy; every file in the folder is read later
                leftover.unlink()
            # A single file may have any name, but in a folder it is found by its standard name.
            renamed = {} if weights.is_dir() else {weights.name: SINGLE}
            files = open_weights(weights).files
            entries = [_copy(file, self.path / renamed.get(file.name, file.name), on_progress) for file in files]
            write_json(self.path / LIST, {"from": str(weights), "files": entries}, durable=True)
        except DataError:
            raise
        except OSError as error:
            raise weights_error(
                f"{weights} can't be copied to {self.path} ({error.strerror}), where adapters need it."
            ) from None

    def verify(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Raise CheckpointError if the files are not those that were copied."""
        for entry in self._entries():
            path = self.path / str(entry["file"])
            try:
                is_intact = path.stat().st_size == entry["bytes"] and _digest(path, on_progress) == entry["sha256"]
            except OSError as error:
                raise CheckpointError(
                    f"{path}, which its adapters belong to, can't be read: {error.strerror}"
                ) from None
            if not is_intact:
                raise CheckpointError(f"{path}, where its adapters belong, is not what was copied there")

    def digest(self) -> str:
        """Return the digest of all base files together."""
        entries = sorted((str(entry["file"]), str(entry["sha256"])) for entry in self._entries())
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"sha256": self.digest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("sha256") != self.digest():
            raise CheckpointError(f"its adapters belong to other weights than those in {self.path}")

    def _entries(self) -> list[dict[str, Any]]:
        return list(self._read_list()["files"])

    def _read_list(self) -> dict[str, Any]:
        try:
            content = json.loads((self.path / LIST).read_text())
            if not all(
                _is_file_name(entry["file"]) and {"bytes", "sha256"} <= entry.keys() for entry in content["files"]
            ):
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(
                f"{self.path}, the weights that its adapters belong to, is not there or damaged"
            ) from None
        return dict(content)


def _is_file_name(name: str) -> bool:
    """Return whether a name is a plain file name, without a path."""
    return name == os.path.basename(name) and name not in {"", os.curdir, os.pardir}


def _copy(source: Path, target: Path, on_progress: Callable[[], None]) -> dict[str, Any]:
    """Copy one file durably; return its entry for the list."""
    digest, size = hashlib.sha256(), 0
    with data_roots.open_file(source) as file, open(target, "wb") as out:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
            size += len(chunk)
            on_progress()
        out.flush()
        os.fsync(out.fileno())
    return {"file": target.name, "bytes": size, "sha256": digest.hexdigest()}


def _digest(path: Path, on_progress: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            on_progress()
    return digest.hexdigest()
