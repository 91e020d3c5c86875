"""Launchers as far as the follower sees them: what an attempt leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jobs.disk import rundir
from jobs.models import Attempt


def newest() -> Attempt:
    return Attempt.objects.select_related("job").latest("number")


def launched(attempt: Attempt, **result: Any) -> Path:
    """What a launcher leaves behind: its folder, and its last word if there is one."""
    folder = rundir.path_of(attempt.job.directory) / "job" / f"attempt-{attempt.number}"
    for part in ("spool", "logs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    owner = {"scheduler_id": attempt.scheduler_id, "restart_count": attempt.scheduler_restart_count}
    (folder / "owner.json").write_text(json.dumps(owner))
    if result:
        (folder / "result.json").write_text(json.dumps(result))
    return folder
