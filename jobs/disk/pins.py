"""Keep `portal/pinned.json` up to date: the checkpoints that a job's trainer must not prune, as the database has them.

    {"pinned": [{"name": "step-400", "step": 400, "generation": 1}]}

Whoever changes a pin writes the file after the commit; if that fails, the follower's tick writes it, and so does the
start of an attempt. There is no lock: after writing, the writer compares the file with the database again, so whoever
writes last has written the present state.
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
MAX_PER_TICK = 20  # of jobs in a tick, in any order


def write(job: Job) -> None:
    """Write what is pinned into the file. If that fails now, a tick does it later."""
    if not job.directory:
        return
    root = rundir.path_of(job.directory)
    try:
        for _ in range(TRIES):
            wanted = pins_payload(Checkpoint.objects.pinned().filter(job=job.pk))
            if read_pins_file(job) == wanted:
                return
            rundir.write(root / FILE, json.dumps(wanted))
    except OSError as error:
        logger.warning("job %s: its pins are not written, tried again: %s", job.pk, error)


def repair() -> None:
    """Rewrite the file of running jobs where it differs from the database."""
    running = Attempt.objects.alive().values("job")
    jobs = Job.objects.filter(pk__in=running).exclude(directory="").only("directory").order_by("?")[:MAX_PER_TICK]
    by_job: dict[int, list[Checkpoint]] = {job.pk: [] for job in jobs}
    for checkpoint in Checkpoint.objects.pinned().filter(job__in=by_job):
        by_job[checkpoint.job_id].append(checkpoint)
    for job in jobs:
        if read_pins_file(job) != pins_payload(by_job[job.pk]):
            write(job)


def is_pruned(job: Job, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint's folder is missing while the job's others can be listed: its trainer pruned it."""
    if not job.directory:
        return False
    root = rundir.path_of(job.directory)
    names = {checkpoint.name, f"step-{checkpoint.step}.g{checkpoint.generation}"}
    try:
        with rundir.folder_under(root, "job/checkpoints"):
            pass  # if this folder is also missing, nothing is known
        return not any(rundir.has_checkpoint(job.directory, name) for name in names)
    except OSError:
        return False


def pins_payload(pinned: Iterable[Checkpoint]) -> dict[str, Any]:
    """Return the content of the file for these checkpoints."""
    pins = [{"name": c.name, "step": c.step, "generation": c.generation} for c in pinned]
    return {"pinned": sorted(pins, key=lambda pin: (pin["step"], pin["generation"]))}


def read_pins_file(job: Job) -> dict[str, Any]:
    """Return the content of the file. A missing file pins nothing; an unreadable one is {}."""
    nothing: dict[str, Any] = {"pinned": []}
    try:
        text = rundir.read_under(rundir.path_of(job.directory), FILE)
    except OSError:
        return nothing
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return payload if isinstance(payload, dict) else {}
