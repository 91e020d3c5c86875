"""`portal/pinned.json`: which checkpoints of a job its trainer must not prune. The database says so, the file follows.

    {"pinned": [{"name": "step-400", "step": 400, "generation": 1}]}

Whoever changes a pin writes it after the commit; what that did not get done the follower's tick does, and so does the
start of an attempt. Nobody locks: who writes looks afterwards whether it still says what the database says, so whoever
writes last has written the truth.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

from jobs.disk import rundir
from jobs.models import Attempt, Checkpoint, Job

logger = logging.getLogger(__name__)

FILE = "portal/pinned.json"
TRIES = 20
AT_ONCE = 20  # of jobs in a tick, in any order


def write(job: Job) -> None:
    """Make the file say what is pinned. If it cannot be written now, the tick does it later."""
    if not job.directory:
        return
    root = rundir.path_of(job.directory)
    try:
        for _ in range(TRIES):
            wanted = _told(Checkpoint.objects.pinned().filter(job=job.pk))
            if _said(job) == wanted:
                return
            rundir.write(root / FILE, json.dumps(wanted))
    except OSError as error:
        logger.warning("job %s: its pins are not written, tried again: %s", job.pk, error)


def repair() -> None:
    """Write it for those running jobs of whose pins it says something else."""
    running = Attempt.objects.alive().values("job")
    jobs = Job.objects.filter(pk__in=running).exclude(directory="").only("directory").order_by("?")[:AT_ONCE]
    by_job: dict[int, list[Checkpoint]] = {job.pk: [] for job in jobs}
    for checkpoint in Checkpoint.objects.pinned().filter(job__in=by_job):
        by_job[checkpoint.job_id].append(checkpoint)
    for job in jobs:
        if _said(job) != _told(by_job[job.pk]):
            write(job)


def is_gone(job: Job, checkpoint: Checkpoint) -> bool:
    """Whether its folder is missing where others of its job are looked for: its trainer has just pruned it."""
    if not job.directory:
        return False
    root = rundir.path_of(job.directory)
    names = {checkpoint.name, f"step-{checkpoint.step}.g{checkpoint.generation}"}
    try:
        with rundir.folder_under(root, "job/checkpoints"):
            pass  # where this one is missing too, nothing is known
        return not any(rundir.has_checkpoint(job.directory, name) for name in names)
    except OSError:
        return False


def _told(pinned: Iterable[Checkpoint]) -> dict[str, Any]:
    pins = [{"name": c.name, "step": c.step, "generation": c.generation} for c in pinned]
    return {"pinned": sorted(pins, key=lambda pin: (pin["step"], pin["generation"]))}


def _said(job: Job) -> dict[str, Any]:
    """What the file says; one that is missing pins nothing."""
    nothing: dict[str, Any] = {"pinned": []}
    try:
        text = rundir.read_under(rundir.path_of(job.directory), FILE)
    except OSError:
        return nothing
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
