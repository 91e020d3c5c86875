"""`vigil cancel`, `kill` and `release`: stop a job, or release one that is held. No Django here."""

from __future__ import annotations

import click

from vigil_cli.params import as_json, job_id, out
from vigil_cli.portal import find_portal

NO_CHECKPOINT = "No last checkpoint is saved; existing checkpoints are kept."


@click.command()
@job_id
@click.option("--now", "at_once", is_flag=True, help="Kill it without a last checkpoint, like vigil kill.")
@as_json
def cancel(job_id: int, at_once: bool, as_json: bool) -> None:
    """Ask a job to stop; it saves a last checkpoint first.

    Repeat it after 10 s or more to kill the job.
    """
    if at_once:
        _kill(job_id, as_json)
        return
    job = find_portal().post(f"jobs/{job_id}/cancel")
    if job["attempt"].get("kill_requested_at"):
        out(job, lambda job: [f"#{job['id']} was already being cancelled and is now killed. {NO_CHECKPOINT}"], as_json)
        return
    how = "It saves a last checkpoint first."
    if job["kind"] == "attached":
        how = "Slurm ends it."
    elif job["started_at"] is None:
        how = "It has not started, so there is nothing to save."
    out(job, lambda job: [f"Cancelling #{job['id']}. {how}"], as_json)


@click.command()
@job_id
@as_json
def release(job_id: int, as_json: bool) -> None:
    """Release a job that is held in Slurm.

    Like `scontrol release`, run as you; for a sysadmin, as the portal.
    """
    job = find_portal().post(f"jobs/{job_id}/release")
    out(job, lambda job: [f"#{job['id']} will be released within seconds. See `vigil why {job['id']}`."], as_json)


@click.command()
@job_id
@as_json
def kill(job_id: int, as_json: bool) -> None:
    """Kill a job at once, without a last checkpoint.

    For a job that does not stop when cancelled. Work since its newest checkpoint is lost.
    """
    _kill(job_id, as_json)


def _kill(job_id: int, as_json: bool) -> None:
    job = find_portal().post(f"jobs/{job_id}/kill")
    out(job, lambda job: [f"#{job['id']} is killed. {NO_CHECKPOINT}"], as_json)


ALL = (cancel, release, kill)
