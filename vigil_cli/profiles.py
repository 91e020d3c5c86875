"""`vigil profile` and `vigil profiles`: steps of a running job, recorded by torch.profiler. No Django here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from vigil_cli import tables
from vigil_cli.params import JobId, as_json, out
from vigil_cli.portal import Portal, Trouble, find_portal

LOOK_S = 1.0
job_id = click.argument("job_id", metavar="ID", type=JobId())


@click.command()
@job_id
@click.option("--steps", type=click.IntRange(1, 100), default=5, show_default=True, help="How many, the next ones.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="The rank that records its own.")
@click.option("--wait", is_flag=True, help="Stay until it is written, and fetch it.")
@as_json
def profile(job_id: int, steps: int, rank: int, wait: bool, as_json: bool) -> None:
    """Profile the next steps of a running job.

    The trace, a gzipped JSON, opens in ui.perfetto.dev and chrome://tracing; it also is on the job's page.
    """
    portal = find_portal()
    asked = portal.post(f"jobs/{job_id}/profile", json={"steps": steps, "rank": rank})
    if not wait:
        said = f"Asked rank {rank} of #{job_id} for {steps} steps. `vigil profiles {job_id}` lists what there is."
        out(asked, lambda asked: [said], as_json)
        return
    found = _written(portal, job_id, asked["id"])
    path = _fetch(portal, job_id, found)
    said = f"{path}: steps {found['first_step']}-{found['last_step']} of rank {found['rank']}"
    out({**found, "file": str(path)}, lambda found: [said], as_json)


@click.command()
@job_id
@click.option("--fetch", metavar="NAME", help="Download this one into the folder that you are in.")
@as_json
def profiles(job_id: int, fetch: str | None, as_json: bool) -> None:
    """List a job's profiles, or fetch one."""
    portal = find_portal()
    found = portal.get(f"jobs/{job_id}/profiles")
    if fetch is None:
        out(found, tables.profiles, as_json)
        return
    chosen = next((told for told in found["items"] if told["name"] == fetch), None)
    if chosen is None:
        raise Trouble(f"#{job_id} has no profile {fetch}. `vigil profiles {job_id}` lists them.")
    path = _fetch(portal, job_id, chosen)
    out({**chosen, "file": str(path)}, lambda chosen: [str(path)], as_json)


def _written(portal: Portal, job_id: int, number: str) -> dict[str, Any]:
    """The profile, once its rank has written it."""
    while True:
        for told in portal.get(f"jobs/{job_id}/profiles")["items"]:
            if told["id"] != number:
                continue
            if told["name"]:
                found: dict[str, Any] = told
                return found
            if not told["waits"]:
                raise Trouble(f"No profile was written. {told['problem']}")
        time.sleep(LOOK_S)


def _fetch(portal: Portal, job_id: int, told: dict[str, Any]) -> Path:
    answer = portal.ask("GET", f"jobs/{job_id}/profiles/{told['attempt']}/{quote(told['name'], safe='')}", tries=2)
    path = Path(f"job-{job_id}.{int(told['attempt'])}-{Path(told['name']).name}")
    path.write_bytes(answer.content)
    return path


ALL = (profile, profiles)
