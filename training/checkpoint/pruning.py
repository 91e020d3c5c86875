"""Remove checkpoints that are no longer needed. A kill at any moment leaves none half deleted or unreported.

    step-400/                    renamed, so that it disappears in one step
    .pruned-step-400.1f2e3d4c/   renamed back if somebody has pinned it meanwhile; else reported, then deleted

The next start completes what a kill interrupted. Pinned checkpoints are listed in `portal/pinned.json` of the run
directory, which the portal replaces atomically; a run without a portal has none.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from training import manifest as manifests
from training.attempt.files import read_json, write_json
from training.manifest import CheckpointError, Manifest, UnreadableManifest

PREFIX = ".pruned-"
_MAX_PIN_FILE_BYTES = 1 << 20
_MISSING_FILE_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True)
class Retention:
    """The rules by which a run keeps checkpoints of its own branch."""

    last: int = 3
    """Number of newest checkpoints to keep."""
    every: int = 0
    """Keep, permanently, the first checkpoint at or after each multiple of this many steps. 0: none."""
    best: int = 0
    """Number of checkpoints to keep with the lowest validation loss at their own step."""

    def select(self, branch: Sequence[Manifest]) -> set[tuple[int, int]]:
        """Return (step, generation) of the checkpoints to keep. `branch`: those of the run's branch, oldest first."""
        selected = list(branch[-self.last :])
        if self.every:
            selected += [found for found in branch if found.step // self.every > _parent_step(found) // self.every]
        scored = [(loss, manifest.identity) for manifest in branch if (loss := _loss(manifest)) is not None]
        return {found.identity for found in selected} | {identity for _, identity in sorted(scored)[: self.best]}


def _parent_step(manifest: Manifest) -> int:
    return manifest.parent[0] if manifest.parent else 0


def _loss(manifest: Manifest) -> float | None:
    loss = manifest.state.get("validation_loss")
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def pinned(job_dir: Path) -> frozenset[tuple[int, int]]:
    """Return (step, generation) of pinned checkpoints: unlike the folder's name, these never change.

    A missing or invalid file pins nothing. Raises OSError if it cannot be read just now, so that nothing is known.
    """
    try:
        with open(job_dir.parent / "portal" / "pinned.json", "rb") as file:
            content = json.loads(file.read(_MAX_PIN_FILE_BYTES))
    except _MISSING_FILE_ERRORS:
        return frozenset()
    except (ValueError, RecursionError):
        return frozenset()
    return frozenset(_identities(content.get("pinned") if isinstance(content, dict) else None))


def start_identities(attempt_dir: Path, start: Manifest | None) -> frozenset[tuple[int, int]]:
    """Return (step, generation) of the checkpoints that the attempt and this incarnation began from: never pruned.

    The first incarnation records the attempt's in start.json.
    """
    path = attempt_dir / "start.json"
    if not path.exists():
        write_json(path, {"step": start.step if start else None, "generation": start.generation if start else None})
    first = frozenset(_identities([read_json(path)]))
    return first | {start.identity} if start is not None else first


def prune(checkpoint: Manifest, job_dir: Path, *, report: Callable[[Manifest], None]) -> bool:
    """Remove a checkpoint unless it is pinned; return whether it was removed.

    `report` returns once its event is on disk; only then the files are deleted, so that no removal goes unreported.

    Whoever pins writes the file first and checks for the folder then. So one of the two notices the other: either the
    folder is missing there, or the pin is read here, after the renaming.
    """
    folder = job_dir / "checkpoints"
    hidden = _hide(folder / checkpoint.name)
    if _is_pinned(checkpoint, job_dir):
        os.rename(hidden, folder / checkpoint.name)
        return False
    report(checkpoint)
    delete(hidden)
    return True


def finish(job_dir: Path, *, report: Callable[[Manifest], None]) -> None:
    """Complete removals that a kill interrupted: restore what is pinned, else report and delete."""
    folder = job_dir / "checkpoints"
    for hidden in folder.glob(f"{PREFIX}*"):
        name = hidden.name.removeprefix(PREFIX).rpartition(".")[0]
        try:
            manifest = replace(manifests.check(hidden), name=name)
        except UnreadableManifest:
            continue
        except CheckpointError:
            delete(hidden)  # its files were being deleted, so it had been reported
            continue
        if not _is_pinned(manifest, job_dir):
            report(manifest)
            delete(hidden)
        elif not (folder / name).exists():
            with suppress(OSError):
                os.rename(hidden, folder / name)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint: renamed first, so that no half deleted folder ever has a checkpoint's name."""
    delete(_hide(checkpoint))


def delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _hide(checkpoint: Path) -> Path:
    hidden = checkpoint.with_name(f"{PREFIX}{checkpoint.name}.{os.urandom(4).hex()}")
    os.rename(checkpoint, hidden)
    return hidden


def _is_pinned(checkpoint: Manifest, job_dir: Path) -> bool:
    """Return whether it is pinned; if that cannot be read just now, assume so."""
    try:
        return checkpoint.identity in pinned(job_dir)
    except OSError:
        return True


def _identities(rows: object) -> Iterator[tuple[int, int]]:
    for row in rows if isinstance(rows, list) else ():
        step, generation = (row.get("step"), row.get("generation")) if isinstance(row, dict) else (None, None)
        if type(step) is int and type(generation) is int:
            yield step, generation
