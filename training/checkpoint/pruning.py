"""Removes checkpoints that nobody needs any more; a kill at any moment leaves none half there, and none untold.

    step-400/                    renamed, so that it is out of sight in one step
    .pruned-step-400.1f2e3d4c/   renamed back if a person has pinned it meanwhile; else told of, then deleted

What a kill leaves of it the next start brings to its end. What people pinned is in `portal/pinned.json` of the run
directory, which the portal replaces whole; a run without a portal has none.
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
from training.manifest import CheckpointError, Manifest, Unreadable

PREFIX = ".pruned-"
_BYTES = 1 << 20
_NONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints of its own line a run keeps."""

    last: int = 3
    """So many of the newest."""
    every: int = 0
    """Kept for good: of every so many steps the first, which is the multiple itself where one was saved. 0: none."""
    best: int = 0
    """So many with the lowest validation loss at their very step."""

    def of(self, line: Sequence[Manifest]) -> set[tuple[int, int]]:
        """(step, generation) of those to keep; `line` is the oldest first."""
        kept = list(line[-self.last :])
        if self.every:
            kept += [found for found in line if found.step // self.every > _step_before(found) // self.every]
        scored = [(loss, found.identity) for found in line if (loss := _loss(found)) is not None]
        return {found.identity for found in kept} | {identity for _, identity in sorted(scored)[: self.best]}


def _step_before(found: Manifest) -> int:
    return found.parent[0] if found.parent else 0


def _loss(found: Manifest) -> float | None:
    loss = found.state.get("validation_loss")
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def pinned(job_dir: Path) -> frozenset[tuple[int, int]]:
    """(step, generation) of what people pinned: a checkpoint's folder may be renamed, these never change.

    A file that is missing or makes no sense pins nothing. OSError if it cannot be read just now: then nothing is known.
    """
    try:
        with open(job_dir.parent / "portal" / "pinned.json", "rb") as file:
            told = json.loads(file.read(_BYTES))
    except _NONE:
        return frozenset()
    except (ValueError, RecursionError):
        return frozenset()
    return frozenset(_identities(told.get("pinned") if isinstance(told, dict) else None))


def starts(attempt_dir: Path, start: Manifest | None) -> frozenset[tuple[int, int]]:
    """(step, generation) of what the attempt began from, which its first incarnation leaves in start.json, and of what
    this one does: neither is ever pruned."""
    path = attempt_dir / "start.json"
    if not path.exists():
        write_json(path, {"step": start.step if start else None, "generation": start.generation if start else None})
    first = frozenset(_identities([read_json(path)]))
    return first | {start.identity} if start is not None else first


def prune(checkpoint: Manifest, job_dir: Path, *, tell: Callable[[Manifest], None]) -> bool:
    """Whether it went. `tell` returns once that is on disk: before the bytes go, so that it is never left untold.

    Whoever pins writes the file first and looks for the folder then. So one of the two sees the other: either it is
    missed there, or read here after the renaming.
    """
    folder = job_dir / "checkpoints"
    doomed = _put_away(folder / checkpoint.name)
    if _is_pinned(checkpoint, job_dir):
        os.rename(doomed, folder / checkpoint.name)
        return False
    tell(checkpoint)
    delete(doomed)
    return True


def finish(job_dir: Path, *, tell: Callable[[Manifest], None]) -> None:
    """What was being pruned when its trainer was killed: back if it is pinned, else told of and deleted."""
    folder = job_dir / "checkpoints"
    for doomed in folder.glob(f"{PREFIX}*"):
        name = doomed.name.removeprefix(PREFIX).rpartition(".")[0]
        try:
            found = replace(manifests.check(doomed), name=name)
        except Unreadable:
            continue
        except CheckpointError:
            delete(doomed)  # its bytes had begun to go, so it was told of
            continue
        if not _is_pinned(found, job_dir):
            tell(found)
            delete(doomed)
        elif not (folder / name).exists():
            with suppress(OSError):
                os.rename(doomed, folder / name)


def remove(checkpoint: Path) -> None:
    """Takes it out of sight in one rename, then deletes: half a checkpoint is never seen under a checkpoint's name."""
    delete(_put_away(checkpoint))


def delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _put_away(checkpoint: Path) -> Path:
    doomed = checkpoint.with_name(f"{PREFIX}{checkpoint.name}.{os.urandom(4).hex()}")
    os.rename(checkpoint, doomed)
    return doomed


def _is_pinned(checkpoint: Manifest, job_dir: Path) -> bool:
    """Whether it is, as far as is known: what cannot be read now may say so."""
    try:
        return checkpoint.identity in pinned(job_dir)
    except OSError:
        return True


def _identities(told: object) -> Iterator[tuple[int, int]]:
    for one in told if isinstance(told, list) else ():
        step, generation = (one.get("step"), one.get("generation")) if isinstance(one, dict) else (None, None)
        if type(step) is int and type(generation) is int:
            yield step, generation
