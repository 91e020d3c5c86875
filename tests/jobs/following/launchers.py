"""Attempts as the follower sees them: what their launchers leave behind, and how they fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.disk import rundir
from jobs.models import Attempt, Incident
from nodes.models import Node
from tests.jobs.schedulers import DGX_01, ScriptedScheduler

Tick = Callable[[], bool]
EXCEPTION = {"rank": 1, "incarnation": 0, "kind": "exception", "exit_code": 1, "signal": None, "error": "KeyError: 'a'"}


def newest() -> Attempt:
    return Attempt.objects.select_related("job").latest("number")


def launched(attempt: Attempt, **result: Any) -> Path:
    """Create what a launcher leaves behind: its folder, and its final report if there is one."""
    folder = rundir.path_of(attempt.job.directory) / "job" / f"attempt-{attempt.number}"
    for part in ("spool", "logs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    owner = {"scheduler_id": attempt.scheduler_id, "restart_count": attempt.scheduler_restart_count}
    (folder / "owner.json").write_text(json.dumps(owner))
    if result:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def machines(scheduler: ScriptedScheduler, *names: str) -> None:
    scheduler.machines = [replace(DGX_01, name=name, plays_many=False) for name in names]
    Node.objects.all().delete()
    Node.objects.bulk_create(Node(name=name, cpus=8) for name in names)


def die(
    scheduler: ScriptedScheduler, tick: Tick, cause: str, *, nodes: tuple[str, ...] = ("dgx01", "dgx02"), **more: Any
) -> Attempt:
    """Fail the newest attempt, have it diagnosed with `cause` and `more`, and let the follower decide."""
    attempt = newest()
    scheduler.update_job(attempt.scheduler_id, state="running", nodes=nodes)
    tick()
    launched(newest(), exit_code=1, cause="failed", first_failure=EXCEPTION)
    scheduler.update_job(attempt.scheduler_id, state="failed", exit_code=1, nodes=nodes)
    tick()
    verdict(attempt, cause, **more)
    tick()
    attempt.refresh_from_db()
    return attempt


def verdict(attempt: Attempt, cause: str, **more: Any) -> None:
    payload = {
        "confidence": 0.94,
        "fingerprint": f"of attempt {attempt.number}"[:32],
        "version": 1,
        "due_at": None,
        **more,
    }
    assert Incident.objects.filter(attempt=attempt).update(cause=cause, **payload) == 1
