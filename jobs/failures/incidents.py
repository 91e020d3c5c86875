"""Turn an incident into a failure to be counted: its program, cost, and the time until training resumed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any

from jobs import lost_work
from jobs.failures.kinds import MACHINES, NOT_FAILURES, PROGRAMS, UNDIAGNOSED
from jobs.models import Drill, Incident
from jobs.reliability.node_time import partition_of, whole

SETTLED_AFTER = timedelta(days=2)
ERROR, CLAIMS = "error ", "claims of "
"""How the keys of programs begin: an error of one person's programs; what only a person's jobs say."""


def fields_of(incident: Incident, default_partition: str, now: datetime) -> dict[str, Any] | None:
    """Return the fields of the incident's failure; None if nothing failed after all."""
    cause = incident.overruled_cause or incident.cause
    if cause in NOT_FAILURES or Drill.objects.filter(job=incident.attempt.job_id).exists():
        return None  # a game day planted it: it says nothing about the node
    attempt, job = incident.attempt, incident.attempt.job
    resources = job.spec.get("resources") or {}
    lost = lost_work.lost_work(incident)
    is_external = (cause in MACHINES and incident.is_confirmed) or cause in UNDIAGNOSED
    return {
        "at": incident.at,
        "day": incident.at.astimezone(UTC).date(),
        "project_id": job.project_id,
        "partition": partition_of(resources.get("partition"), default_partition),
        "node": incident.node or (attempt.nodes[0] if len(attempt.nodes) == 1 else ""),
        "cause": cause,
        "program": _program(incident, cause),
        "is_interruption": is_external or lost.was_continued,
        "lost_node_s": lost.node_s,
        "lost_gpu_s": lost.node_s * whole(resources.get("gpus_per_node")),
        "detect_s": lost.moments.detect_s,
        "recover_s": lost.moments.recover_s,
        "is_settled": (incident.is_final and lost.is_over) or now - incident.at > SETTLED_AFTER,
    }


def _program(incident: Incident, cause: str) -> str:
    """Return a key that is equal when the same program fails again: owner and fingerprint, unless a machine failed.

    Two people's programs may fail with the same text, so an error is always one person's. The key does not show whose.
    A GPU that falls off the bus produces the same text under every job, so each job or sweep counts as its own
    program. If only the job's log or a person says that a machine is broken, or nothing says why it failed, it counts
    once per owner, so that nobody's claim alone can blame a node.
    """
    job = incident.attempt.job
    if cause in (*PROGRAMS, *UNDIAGNOSED) and incident.fingerprint:
        about = f"{job.owner_id} {incident.fingerprint}".encode()
        return f"{ERROR}{blake2b(about, digest_size=8).hexdigest()}"
    if cause in UNDIAGNOSED or (cause in MACHINES and not incident.is_confirmed):
        return f"{CLAIMS}{job.owner_id}"
    return f"sweep {job.sweep_id}" if job.sweep_id else f"job {job.pk}"
