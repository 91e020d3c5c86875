"""Determine where a run reads and writes: as Vigil's launcher says, or in a new attempt when started manually."""

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
class Workspace:
    """The folders of one incarnation, and the checkpoint that it starts from."""

    run_dir: Path
    attempt_dir: Path
    incarnation: int
    generation: int
    resume: str
    """Name of a checkpoint; "": start from scratch."""
    launched: bool
    """Whether Vigil's launcher started this; it then handles signals, watches the heartbeat and maintains the fence."""
    full_world_size: int = 0
    """The most ranks that an elastic run can have; 0: not elastic. With fewer ranks, shares may be uneven."""

    @property
    def job_dir(self) -> Path:
        return self.run_dir / "job"


def from_launcher(environment: Mapping[str, str] = os.environ) -> Workspace | None:
    """Return the workspace that the launcher passed to this rank in its environment, or None without a launcher."""
    if "VIGIL_RUN_DIR" not in environment:
        return None
    return Workspace(
        run_dir=Path(environment["VIGIL_RUN_DIR"]),
        attempt_dir=Path(environment["VIGIL_ATTEMPT_DIR"]),
        incarnation=int(environment["VIGIL_INCARNATION"]),
        generation=int(environment["VIGIL_GENERATION"]),
        resume=environment.get("VIGIL_RESUME", ""),
        launched=True,
        full_world_size=int(environment.get("VIGIL_FULL_WORLD_SIZE") or 0),
    )


def create_standalone(run_dir: Path, *, resume: str = NEWEST) -> Workspace:
    """Create the next attempt in a run directory that no launcher manages.

    One process calls it and informs the others.
    """
    job_dir = run_dir / "job"
    job_dir.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in job_dir.iterdir() if (match := FOLDER.fullmatch(path.name))]
    attempt_dir = job_dir / f"attempt-{max(numbers, default=0) + 1}"
    attempt_dir.mkdir()
    start = {NEWEST: newest_on_lineage(job_dir), FRESH: ""}.get(resume, resume)
    generation = raise_generation(job_dir, previous=None, resume=start)
    return Workspace(run_dir, attempt_dir, 0, generation, start, launched=False)
