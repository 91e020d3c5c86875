"""`vigil profile` and `vigil profiles`: record steps of a running job with torch.profiler. No Django here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from vigil_cli.params import as_json, job_id, out
from vigil_cli.portal import CliError, Portal, find_portal
from vigil_cli.tables import jobs as job_tables
from vigil_cli.tables.columns import current

POLL_S = 1.0


@click.command()
@job_id
@click.option(
    "--steps", type=click.IntRange(1, 100), default=5, show_default=True, help="How many of the next steps to record."
)
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="The rank to profile.")
@click.option("--wait", is_flag=True, help="Wait until it is written, and download it.")
@as_json
def profile(job_id: int, steps: int, rank: int, wait: bool, as_json: bool) -> None:
    """Profile the next steps of a running job.

    The trace is a gzipped JSON file that opens in ui.perfetto.dev and chrome://tracing; the job's page has it too.
    """
    portal = find_portal()
    profile_request = portal.post(f"jobs/{job_id}/profile", json={"steps": steps, "rank": rank})
    if not wait:
        message = f"Requested {steps} steps from rank {rank} of #{job_id}. `vigil profiles {job_id}` lists the results."
        out(profile_request, lambda profile_request: [message], as_json)
        return
    found = _wait_until_written(portal, job_id, profile_request["id"])
    path = _fetch(portal, job_id, found)
    message = f"{path}: steps {found['first_step']}-{found['last_step']} of rank {found['rank']}"
    out({**found, "file": str(path)}, lambda found: [message], as_json)


@click.command()
@job_id
@click.option("--fetch", metavar="NAME", help="Download this profile into the current folder.")
@as_json
def profiles(job_id: int, fetch: str | None, as_json: bool) -> None:
    """List a job's profiles, or download one."""
    portal = find_portal()
    found = portal.get(f"jobs/{job_id}/profiles")
    if fetch is None:
        out(found, job_tables.profiles, as_json)
        return
    chosen = next((item for item in found["items"] if item["name"] == fetch), None)
    if chosen is None:
        raise CliError(f"#{job_id} has no profile {fetch}. `vigil profiles {job_id}` lists them.")
    path = _fetch(portal, job_id, chosen)
    out({**chosen, "file": str(path)}, lambda chosen: [str(path)], as_json)


def _wait_until_written(portal: Portal, job_id: int, number: str) -> dict[str, Any]:
    """Wait until the rank has written the profile, and return it."""
    while True:
        for item in portal.get(f"jobs/{job_id}/profiles")["items"]:
            if item["id"] != number:
                continue
            if item["name"]:
                found: dict[str, Any] = item
                return found
            if not current(item, "is_pending", "waits"):
                raise CliError(f"No profile was written. {item['problem']}")
        time.sleep(POLL_S)


def _fetch(portal: Portal, job_id: int, item: dict[str, Any]) -> Path:
    answer = portal.request("GET", f"jobs/{job_id}/profiles/{item['attempt']}/{quote(item['name'], safe='')}", tries=2)
    path = Path(f"job-{job_id}.{int(item['attempt'])}-{Path(item['name']).name}")
    path.write_bytes(answer.content)
    return path


ALL = (profile, profiles)
