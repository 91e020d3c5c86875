"""An incident as a failure that is counted: whose, of which program, what it cost, how long until it trained again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from jobs import lost
from jobs.failures.kinds import MACHINES, NOT_FAILURES, PROGRAMS, UNDIAGNOSED
from jobs.models import Incident
from jobs.reliability.allocations import partition_of, whole

SETTLED_AFTER = timedelta(days=2)


def fields_of(incident: Incident, default_partition: str, now: datetime) -> dict[str, Any] | None:
    """What its failure says; None where nothing failed after all."""
    cause = incident.overruled_cause or incident.cause
    if cause in NOT_FAILURES:
        return None
    attempt, job = incident.attempt, incident.attempt.job
    resources = job.spec.get("resources") or {}
    found = lost.of(incident)
    struck = (cause in MACHINES and incident.is_confirmed) or cause in UNDIAGNOSED
    return {
        "at": incident.at,
        "day": incident.at.astimezone(UTC).date(),
        "project_id": job.project_id,
        "partition": partition_of(resources.get("partition"), default_partition),
        "node": incident.node or (attempt.nodes[0] if len(attempt.nodes) == 1 else ""),
        "cause": cause,
        "program": _program(incident, cause),
        "is_interruption": struck or found.went_on,
        "lost_node_s": found.node_s,
        "lost_gpu_s": found.node_s * whole(resources.get("gpus_per_node")),
        "detect_s": found.moments.detect_s,
        "recover_s": found.moments.recover_s,
        "is_settled": (incident.is_final and found.is_over) or now - incident.at > SETTLED_AFTER,
    }


def _program(incident: Incident, cause: str) -> str:
    """What is the same when the same program fails again: its fingerprint, where it is the program that failed.

    A GPU that falls off the bus says the same under every job: there each job, or sweep, is a program of its own. What
    only the job's log or a person says is broken counts once for its owner, so that nobody's word alone blames a node.
    """
    if cause in PROGRAMS and incident.fingerprint:
        return f"print {incident.fingerprint}"
    job = incident.attempt.job
    if cause in MACHINES and not incident.is_confirmed:
        return f"claims of {job.owner_id}"
    return f"sweep {job.sweep_id}" if job.sweep_id else f"job {job.pk}"
