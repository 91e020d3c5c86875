"""`vigil checkpoints`, `vigil pin` and `vigil unpin`: what a job has saved, and what of it stays. No Django here."""

from __future__ import annotations

from urllib.parse import quote

import click

from vigil_cli import tables
from vigil_cli.params import JobId, as_json, out
from vigil_cli.portal import find_portal, kind_of

job_id = click.argument("job_id", metavar="ID", type=JobId())
checkpoint_name = click.argument("name", metavar="CHECKPOINT", callback=lambda context, option, name: _named(name))


@click.command()
@job_id
@as_json
def checkpoints(job_id: int, as_json: bool) -> None:
    """List a job's checkpoints.

    `python -m training export FOLDER/job/checkpoints/NAME --hf MODEL`, where their folder is, takes the model out: a
    folder that transformers loads. The page's tab Checkpoints has the line to copy.
    """
    portal = find_portal()
    found = list(portal.items(f"jobs/{job_id}/checkpoints", limit=200))
    out({"items": found}, lambda told: tables.checkpoints(told, kind_of(portal, job_id).counts), as_json)


@click.command()
@job_id
@checkpoint_name
@as_json
def pin(job_id: int, name: str, as_json: bool) -> None:
    """Keep a checkpoint, such as step-400, from being pruned."""
    _pin(job_id, name, True, as_json)


@click.command()
@job_id
@checkpoint_name
@as_json
def unpin(job_id: int, name: str, as_json: bool) -> None:
    """Let a pinned checkpoint be pruned again when its turn comes."""
    _pin(job_id, name, False, as_json)


def _named(checkpoint: str) -> str:
    """The checkpoint's name: a step's number alone will do."""
    return f"step-{int(checkpoint)}" if checkpoint.isdecimal() else checkpoint


def _pin(job_id: int, name: str, pinned: bool, as_json: bool) -> None:
    address = f"jobs/{job_id}/checkpoints/{quote(name, safe='')}"
    found = find_portal().patch(address, json={"pinned": pinned})
    said = "Pinned" if pinned else "Unpinned"
    out(found, lambda checkpoint: [f"{said} {checkpoint['name']} of #{job_id}."], as_json)


ALL = (checkpoints, pin, unpin)
