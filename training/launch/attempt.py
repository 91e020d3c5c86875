"""The attempt's folder, the fence that keeps an older launch from writing, and where to resume (PROTOCOLS §1, §4)."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from training.launch.plan import Plan
from training.manifest import committed
from training.rendezvous import read_json, write_json

FOLDER = re.compile(r"attempt-(\d{1,9})")
CHECKPOINT = re.compile(r"step-\d{1,18}(\.g\d{1,9})?")
PARTS = ("spool", "logs", "flight", "stacks", "members", "heartbeat")


@dataclass(frozen=True)
class Attempt:
    """The folder of one (scheduler id, restart count). `resume` is what a person chose for exactly this attempt."""

    folder: Path
    number: int
    resume: str = ""


def take_attempt(plan: Plan) -> Attempt:
    """The folder that is ours already (another node made it, or we ran before), else a new one, made exclusively."""
    owner = {"scheduler_id": plan.scheduler_id, "restart_count": plan.restart_count}
    hint = read_json(plan.run_dir / "portal" / "attempt.json") or {}
    hinted = hint.get("number")
    wanted = hinted if type(hinted) is int and hinted > 0 else 0
    while True:
        folders = _folders(plan.job_dir)
        mine = next((number for number, folder in folders.items() if _owned(folder, owner)), None)
        number = mine or (wanted if wanted and wanted not in folders else max([wanted, *folders], default=0) + 1)
        if mine or _make(plan.job_dir / f"attempt-{number}", owner):
            chosen = hint.get("resume") if number == wanted else None
            resume = chosen if isinstance(chosen, str) and CHECKPOINT.fullmatch(chosen) else ""
            return Attempt(plan.job_dir / f"attempt-{number}", number, resume)


def _folders(job_dir: Path) -> dict[int, Path]:
    with os.scandir(job_dir) as entries:
        return {int(m[1]): Path(entry.path) for entry in entries if (m := FOLDER.fullmatch(entry.name))}


def _owned(folder: Path, owner: dict[str, object]) -> bool:
    return read_json(folder / "owner.json") == owner


def _make(folder: Path, owner: dict[str, object]) -> bool:
    """Appear with the owner inside, by rename, which fails where such a folder (never empty) already is."""
    staging = folder.with_name(f".{folder.name}.{os.urandom(4).hex()}")
    for part in PARTS:
        (staging / part).mkdir(parents=True)
    write_json(staging / "owner.json", owner, durable=True)
    try:
        os.rename(staging, folder)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        return False
    return True


class Fenced(Exception):
    """A newer launch has taken over: this one must not write any more."""


def read_generation(job_dir: Path) -> int:
    with suppress(OSError, ValueError):
        return int((job_dir / "GENERATION").read_text())
    return 0


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
    return generation


def give_up_claim(job_dir: Path, generation: int) -> None:
    """Of an incarnation that another launcher was quicker to form."""
    with suppress(OSError):
        (job_dir / "generations" / str(generation)).unlink()


def publish_generation(job_dir: Path, generation: int) -> None:
    """From now on everything of an older generation stops. By every launcher that takes part, and it only ever rises:
    one that was paused in here finds the higher marks when it goes on, before it starts anything."""
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
    for manifest in committed(checkpoints):
        found[manifest.name] = (manifest.generation, manifest.step)
    return found
