"""List the local scheduler's pending and running jobs with their resources."""

from __future__ import annotations

import os
import pwd

from nodes.schedulers.cluster import QueuedJobInfo
from nodes.schedulers.local import shim, slots

PARTITION = "local"
MAX_LISTED = 500  # each one costs reading two files


def queued_jobs(
    root: str, jobs: list[tuple[int, slots.JsonObject, slots.JsonObject | None]], *, user: str
) -> list[QueuedJobInfo]:
    """Describe the jobs of `slots.alive`, oldest first. `user` is the Unix user that jobs run as, if not ours."""
    name = user or pwd.getpwuid(os.geteuid()).pw_name
    found = (_queued_job(root, job_id, ticket, taken, name) for job_id, ticket, taken in jobs[:MAX_LISTED])
    return [job for job in found if job is not None]


def _queued_job(
    root: str, job_id: int, ticket: slots.JsonObject, taken: slots.JsonObject | None, user: str
) -> QueuedJobInfo | None:
    folder = slots.folder(root, job_id)
    request = slots.read_json(os.path.join(folder, "request.json"))
    if request is None:
        return None
    status = slots.read_json(os.path.join(folder, "status.json")) or {}
    nodes = taken["nodes"] if taken else ticket["min_nodes"]
    resources = taken or {name: ticket[name] * nodes for name in ("cpus", "memory_mib")}
    started = status.get("started_at")
    return QueuedJobInfo(
        scheduler_id=str(job_id),
        name=request["name"],
        user=user,
        state=status.get("state", "pending"),
        partition=PARTITION,
        reason=status.get("reason", "") if taken is None else "",
        submitted_at=request["submitted_at"],
        started_at=started,
        ends_at=started + request["time_limit_s"] if started else None,
        time_limit_s=request["time_limit_s"],
        nodes=tuple(status.get("nodes", ())),
        node_count=nodes,
        cpus=resources["cpus"],
        gpus=len(taken["gpus"]) if taken else ticket["gpus"] * nodes,
        memory_mib=resources["memory_mib"],
        gpu_indices=_indices(taken),
        restart_count=status.get("restart_count", 0),
    )


def _indices(taken: slots.JsonObject | None) -> dict[str, tuple[int, ...]]:
    """Return the job's GPU indices by node. All are on this one machine, whichever node it stands for."""
    indices = tuple(int(gpu) for gpu in taken["gpus"] if str(gpu).isdecimal()) if taken else ()
    return {shim.node_names(1)[0]: indices} if indices else {}
