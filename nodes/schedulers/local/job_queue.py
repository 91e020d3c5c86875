"""This machine's queue as a scheduler tells it: who waits, who runs, with what."""

from __future__ import annotations

import os
import pwd

from nodes.schedulers.cluster import QueuedJob
from nodes.schedulers.local import shim, slots

PARTITION = "local"
MOST_TOLD = 500  # each costs two files


def described(root: str, jobs: list[tuple[int, slots.Facts, slots.Facts | None]], *, user: str) -> list[QueuedJob]:
    """Describes the jobs of `slots.alive`, oldest first; `user`: the Unix user that jobs run as, if not ours."""
    name = user or pwd.getpwuid(os.geteuid()).pw_name
    told = (_told(root, job_id, ticket, taken, name) for job_id, ticket, taken in jobs[:MOST_TOLD])
    return [job for job in told if job is not None]


def _told(root: str, job_id: int, ticket: slots.Facts, taken: slots.Facts | None, user: str) -> QueuedJob | None:
    place = slots.folder(root, job_id)
    request = slots.read_json(os.path.join(place, "request.json"))
    if request is None:
        return None
    status = slots.read_json(os.path.join(place, "status.json")) or {}
    nodes = taken["nodes"] if taken else ticket["min_nodes"]
    has = taken or {name: ticket[name] * nodes for name in ("cpus", "memory_mib")}
    started = status.get("started_at")
    return QueuedJob(
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
        cpus=has["cpus"],
        gpus=len(taken["gpus"]) if taken else ticket["gpus"] * nodes,
        memory_mib=has["memory_mib"],
        gpu_indices=_indices(taken),
        restart_count=status.get("restart_count", 0),
    )


def _indices(taken: slots.Facts | None) -> dict[str, tuple[int, ...]]:
    """All on the one machine, whichever node it plays."""
    held = tuple(int(gpu) for gpu in taken["gpus"] if str(gpu).isdecimal()) if taken else ()
    return {shim.node_names(1)[0]: held} if held else {}
