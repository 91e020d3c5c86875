"""The fence that keeps an older launch from writing, and the choice of where to resume (protocols.md §1, §4)."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from training.manifest import RETRY_SECONDS, committed

PATIENCE_SECONDS = 5.0
"""Seconds to retry where the file system cannot read a checkpoint: resuming from an older one would discard work."""
READ_TRIES = 3


class Fenced(Exception):
    """A newer launch has taken over: this one must not write any more."""


def read_generation(job_dir: Path) -> int:
    """Return the newest launch's generation, or 0 if there is none yet or it cannot be read."""
    for _ in range(READ_TRIES):
        try:
            return int((job_dir / "GENERATION").read_text())
        except FileNotFoundError:
            break
        except (
            OSError,
            ValueError,
        ):  # over NFS a file that is replaced while it is read becomes stale: read the new one
            time.sleep(RETRY_SECONDS)
    return 0


def check_fence(job_dir: Path, generation: int) -> None:
    """Raise Fenced if a newer launch has taken over, so that this process must not write any more."""
    newest = read_generation(job_dir)
    if newest > generation:
        raise Fenced(f"generation {newest} has replaced {generation}, which must not write any more")


def raise_generation(job_dir: Path, *, previous: int | None, resume: str) -> int:
    """Claim and publish the next generation, where no other launcher takes part in the decision."""
    generation = claim_generation(job_dir, previous=previous, resume=resume)
    publish_generation(job_dir, generation)
    return generation


def claim_generation(job_dir: Path, *, previous: int | None, resume: str) -> int:
    """Claim the next generation exclusively, and record the checkpoint that it starts from.

    `previous`: the attempt's last generation. Raises Fenced if a newer one has been published since, as this is then
    the older launch. A claim fences nobody before it is published.
    """
    current = read_generation(job_dir)
    if previous is not None and current > previous:
        raise Fenced(f"generation {current} has replaced {previous}")
    claims = job_dir / "generations"
    claims.mkdir(exist_ok=True)
    generation = current + 1
    while True:
        try:
            with open(claims / str(generation), "x") as file:
                file.write(resume)
                file.flush()
                os.fsync(file.fileno())
            break
        except FileExistsError:
            generation += 1  # claimed by a launch that died before publishing it, or is about to
        except OSError:
            withdraw_claim(job_dir, generation)  # an empty file would mean that it started from scratch
            raise
    return generation


def withdraw_claim(job_dir: Path, generation: int) -> None:
    """Withdraw a claim whose incarnation lost the race against another launcher's, or could not be recorded."""
    with suppress(OSError):
        (job_dir / "generations" / str(generation)).unlink()


def publish_generation(job_dir: Path, generation: int) -> None:
    """Publish a generation, which fences everything older. Every launcher that takes part does so.

    The number only ever increases: a launcher that was paused in here finds the higher marks when it continues,
    before it starts anything.
    """
    marks = job_dir / "generations"
    (marks / f"{generation}.published").touch()
    while True:
        highest = max(int(mark.name.removesuffix(".published")) for mark in marks.glob("*.published"))
        if read_generation(job_dir) >= highest:
            return
        temporary = job_dir / f".GENERATION.{highest}.{os.getpid()}.{os.urandom(2).hex()}"
        temporary.write_text(f"{highest}\n")
        os.replace(temporary, job_dir / "GENERATION")


def newest_on_lineage(job_dir: Path) -> str:
    """Return the committed checkpoint to resume from; "" means from the start.

    Every launch recorded its generation and what it started from. The newest launch that committed anything decides:
    its last commit, else what it started from, else its parent's, and so on. It is never simply the highest step,
    which may lie on a branch that somebody has gone back from.
    """
    committed = _committed(job_dir / "checkpoints")
    for generation in range(read_generation(job_dir), 0, -1):
        names = [name for name, (made_by, _) in committed.items() if made_by == generation]
        if names:
            return max(names, key=lambda name: committed[name][1])
        with suppress(OSError):
            start = (job_dir / "generations" / str(generation)).read_text().strip()
            if not start or start in committed:
                return start
    # No launch left a usable record: the run directory was copied, or trained in without a launcher.
    return max(committed, key=lambda name: committed[name], default="")


def _committed(checkpoints: Path) -> dict[str, tuple[int, int]]:
    """Map the name of every checkpoint that is complete by its manifest and file sizes to (generation, step)."""
    found = {}
    for manifest in committed(checkpoints, patience=PATIENCE_SECONDS):
        found[manifest.name] = (manifest.generation, manifest.step)
    return found
