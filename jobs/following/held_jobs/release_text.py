"""Name what releases a job that the scheduler holds, for sentences and notifications. Pure."""

from __future__ import annotations


def release_ways(scheduler_id: str = "", job_id: int | None = None) -> str:
    """Return what releases a held job: “Release it” on its page, vigil release 12 or scontrol release 77.

    Only the scheduler's command where `job_id`, Vigil's, is None: a job that Vigil does not follow.
    """
    command = f"scontrol release {scheduler_id}".rstrip()
    return command if job_id is None else f"“Release it” on its page, vigil release {job_id} or {command}"
