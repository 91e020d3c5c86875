"""The fence that keeps an older launch from writing, and where to resume (protocols.md §1, §4)."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from training.manifest import AGAIN_SECONDS, committed

PATIENCE_SECONDS = 5.0
"""Seconds of patience with a file system that can't give a checkpoint: to go on from an older one throws work away."""
READ_TRIES = 3


class Fenced(Exception):
    """A newer launch has taken over: this one must not write any more."""


def read_generation(job_dir: Path) -> int:
    """The newest launch's, or 0 where there was none yet, or its number cannot be read."""
    for _ in range(READ_TRIES):
        try:
            return int((job_dir / "GENERATION").read_text())
        except FileNotFoundError:
            break
        except (OSError, ValueError):  # over NFS one that is replaced while it is read is stale: the new one is there
            time.sleep(AGAIN_SECONDS)
    return 0


def check_fence(job_dir: Path, generation: int) -> None:
    """Raises Fenced if a newer launch has taken over: then this process must write nothing any more."""
    newest = read_generation(job_dir)
    if newest > generation:
        raise Fenced(f"generation {newest} has replaced {generation}, which must not write any more")


def raise_generation(job_dir: Path, *, mine: int | None, resume: str) -> int:
    """Take the next generation and publish it, where nobody else decides what this launch starts."""
    generation = claim_generation(job_dir, mine=mine, resume=resume)
    publish_generation(job_dir, generation)
    return generation


def claim_generation(job_dir: Path, *, mine: int | None, resume: str) -> int:
    """Take the next generation, exclusively; remember what it starts from.

    `mine` is the attempt's last one: where another one stands there now, ours is the older launch. Nothing is fenced
    before it is published.
    """
    current = read_generation(job_dir)
    if mine is not None and current > mine:
        raise Fenced(f"generation {current} has replaced {mine}")
    taken = job_dir / "generations"
    taken.mkdir(exist_ok=True)
    generation = current + 1
    while True:
        try:
            with open(taken / str(generation), "x") as file:
                file.write(resume)
                file.flush()
                os.fsync(file.fileno())
            break
        except FileExistsError:
            generation += 1  # taken by a launch that died before it published, or that is about to
        except OSError:
            give_up_claim(job_dir, generation)  # an empty file would say that it had started afresh
            raise
    return generation


def give_up_claim(job_dir: Path, generation: int) -> None:
    """Withdraw a generation whose incarnation another launcher was quicker to form, or that could not be told."""
    with suppress(OSError):
        (job_dir / "generations" / str(generation)).unlink()


def publish_generation(job_dir: Path, generation: int) -> None:
    """Publish a generation: from now on everything of an older one stops. Every launcher that takes part does so, and
    the number only ever rises: one that was paused in here finds the higher marks when it goes on, before it starts
    anything."""
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
    """The committed checkpoint to go on from: "" means from the start.

    Every launch left its generation and what it started from. The newest launch that committed anything decides: its
    last commit, else what it had started from, else that one's parents: never simply the highest step, which may lie on
    a line that somebody has gone back from.
    """
    committed = _committed(job_dir / "checkpoints")
    for generation in range(read_generation(job_dir), 0, -1):
        mine = [name for name, (made_by, _) in committed.items() if made_by == generation]
        if mine:
            return max(mine, key=lambda name: committed[name][1])
        with suppress(OSError):
            start = (job_dir / "generations" / str(generation)).read_text().strip()
            if not start or start in committed:
                return start
    # No launch left a trace that still holds: a run directory that was copied, or trained in without a launcher.
    return max(committed, key=lambda name: committed[name], default="")


def _committed(checkpoints: Path) -> dict[str, tuple[int, int]]:
    """Name → (generation, step) of every checkpoint that is whole as far as its manifest and sizes tell."""
    found = {}
    for manifest in committed(checkpoints, patience=PATIENCE_SECONDS):
        found[manifest.name] = (manifest.generation, manifest.step)
    return found
