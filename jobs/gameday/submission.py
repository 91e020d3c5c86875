"""Submit the job of a drill: two ranks on one node that break as instructed."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

from jobs.models import Drill, Job
from jobs.spec import JobSpec, write_toml
from jobs.submitting.submit import submit
from portal.models import User

PROGRAM = Path(__file__).parents[2] / "training" / "gameday.py"
TAG = "game-day"
RANKS = 2
TIME_LIMIT = "00:15:00"


def submit_drill(user: User, drill: Drill) -> Job:
    """Submit the drill's job as this person; a repeated call returns the same job. Raises JobError."""
    spec = JobSpec.parse(_spec(drill))
    job, _ = submit(user, spec, spec_toml=write_toml(spec), key=f"game-day-{drill.pk}", code=_code())
    return job


def _spec(drill: Drill) -> dict[str, Any]:
    game_day = drill.game_day
    resources: dict[str, Any] = {"nodes": 1, "ranks_per_node": RANKS, "time_limit": TIME_LIMIT}
    if game_day.partition:
        resources["partition"] = game_day.partition
    return {
        "name": f"game-day-{game_day.pk}-{drill.fault}",
        "kind": "script",
        "project": game_day.project.slug,
        "tags": [TAG],
        "script": {"directory": ".", "entry": PROGRAM.name, "args": [drill.fault]},
        "restart": {"in_place": 0, "max_restarts": 1},
        "resources": resources,
    }


def _code() -> bytes:
    """Return the program as people upload code. The same bytes each time, or a repeat would be another request."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo(PROGRAM.name)
        data = PROGRAM.read_bytes()
        member.size, member.mode = len(data), 0o644
        archive.addfile(member, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), mtime=0)
