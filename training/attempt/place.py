"""Where a run reads and writes: told by Vigil's launcher, or a folder of its own when it is started by hand."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training.attempt.lineage import newest_on_lineage, raise_generation

FOLDER = re.compile(r"attempt-(\d{1,9})")
NEWEST, FRESH = "newest", "none"


@dataclass(frozen=True)
class Place:
    """The folders of one incarnation, and what it starts from."""

    run_dir: Path
    attempt_dir: Path
    incarnation: int
    generation: int
    resume: str
    """Name of a checkpoint; "": start afresh."""
    launched: bool
    """Whether Vigil's launcher started this, which handles signals, watches the heartbeat and keeps the fence."""
    full_world_size: int = 0
    """Ranks that an elastic run has at most; 0: it is not one. With fewer, shares may be uneven."""

    @property
    def job_dir(self) -> Path:
        return self.run_dir / "job"


def from_launcher(environment: Mapping[str, str] = os.environ) -> Place | None:
    """What the launcher has told this rank, if it has."""
    if "VIGIL_RUN_DIR" not in environment:
        return None
    return Place(
        run_dir=Path(environment["VIGIL_RUN_DIR"]),
        attempt_dir=Path(environment["VIGIL_ATTEMPT_DIR"]),
        incarnation=int(environment["VIGIL_INCARNATION"]),
        generation=int(environment["VIGIL_GENERATION"]),
        resume=environment.get("VIGIL_RESUME", ""),
        launched=True,
        full_world_size=int(environment.get("VIGIL_FULL_WORLD_SIZE") or 0),
    )


def by_hand(run_dir: Path, *, resume: str = NEWEST) -> Place:
    """The next attempt in a run directory of one's own. One process calls it and tells the others."""
    job_dir = run_dir / "job"
    job_dir.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in job_dir.iterdir() if (match := FOLDER.fullmatch(path.name))]
    attempt_dir = job_dir / f"attempt-{max(numbers, default=0) + 1}"
    attempt_dir.mkdir()
    start = {NEWEST: newest_on_lineage(job_dir), FRESH: ""}.get(resume, resume)
    generation = raise_generation(job_dir, mine=None, resume=start)
    return Place(run_dir, attempt_dir, 0, generation, start, launched=False)
