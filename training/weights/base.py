"""What adapters are beside: the weights that a run started from, kept once in its own folder.

    job/base/model.safetensors, config.json, …      copied as they were by the run's first start
    job/base/BASE                                   JSON: each file with its size and sha256; there once all are

Checkpoints of such a run hold adapters alone, and remember the digest of BASE. So a run resumes though the folder that
it was started from is gone or has changed; and a base that is not what a checkpoint belongs to is refused.
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
from training.weights.opening import SINGLE, open_weights, wrong

FOLDER, LIST = "base", "BASE"
CHUNK_BYTES = 16 * 2**20


class Base:
    """The copy. What a checkpoint remembers of it is its digest."""

    def __init__(self, job_dir: Path) -> None:
        self.path = job_dir / FOLDER

    @property
    def is_kept(self) -> bool:
        return (self.path / LIST).exists()

    def keep(self, weights: Path, tell: Callable[[], None] = lambda: None) -> None:
        """Copies the weights unless they are here; `tell` is called every few megabytes. One process calls it."""
        if self.is_kept:
            if (before := self._about().get("from")) != str(weights):
                raise wrong(f"is {weights}, but this run's adapters belong to {before}. Use another run directory.")
            return
        try:
            self.path.mkdir(exist_ok=True)
            for left in self.path.iterdir():  # by a copy that was cut short: whatever lies there is read
                left.unlink()
            # A single file may be called anything; where it is to be found in a folder it may not.
            named = {} if weights.is_dir() else {weights.name: SINGLE}
            files = open_weights(weights).files
            listed = [_copy(file, self.path / named.get(file.name, file.name), tell) for file in files]
            write_json(self.path / LIST, {"from": str(weights), "files": listed}, durable=True)
        except DataError:
            raise
        except OSError as error:
            raise wrong(
                f"{weights} can't be copied to {self.path} ({error.strerror}), where adapters need it."
            ) from None

    def verify(self, tell: Callable[[], None] = lambda: None) -> None:
        """CheckpointError if it is not what was copied."""
        for entry in self._listed():
            path = self.path / str(entry["file"])
            try:
                same = path.stat().st_size == entry["bytes"] and _digest(path, tell) == entry["sha256"]
            except OSError as error:
                raise CheckpointError(
                    f"{path}, which its adapters belong to, can't be read: {error.strerror}"
                ) from None
            if not same:
                raise CheckpointError(f"{path}, where its adapters belong, is not what was copied there")

    def digest(self) -> str:
        """The digest of the whole base."""
        listed = sorted((str(entry["file"]), str(entry["sha256"])) for entry in self._listed())
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    def remember(self) -> dict[str, Any]:
        return {"sha256": self.digest()}

    def recall(self, told: Mapping[str, Any]) -> None:
        if told.get("sha256") != self.digest():
            raise CheckpointError(f"its adapters belong to other weights than those in {self.path}")

    def _listed(self) -> list[dict[str, Any]]:
        return list(self._about()["files"])

    def _about(self) -> dict[str, Any]:
        try:
            found = json.loads((self.path / LIST).read_text())
            if not all(_is_beside(entry["file"]) and {"bytes", "sha256"} <= entry.keys() for entry in found["files"]):
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(
                f"{self.path}, the weights that its adapters belong to, is not there or damaged"
            ) from None
        return dict(found)


def _is_beside(name: str) -> bool:
    """Whatever people call their files."""
    return name == os.path.basename(name) and name not in {"", os.curdir, os.pardir}


def _copy(source: Path, target: Path, tell: Callable[[], None]) -> dict[str, Any]:
    """Copies one file durably; what it wrote."""
    digest, size = hashlib.sha256(), 0
    with data_roots.open_file(source) as file, open(target, "wb") as out:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
            size += len(chunk)
            tell()
        out.flush()
        os.fsync(out.fileno())
    return {"file": target.name, "bytes": size, "sha256": digest.hexdigest()}


def _digest(path: Path, tell: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            tell()
    return digest.hexdigest()
