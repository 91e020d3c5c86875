"""`vigil checkpoints`, `vigil pin` and `vigil unpin`: a job's checkpoints and their retention. No Django here."""

from __future__ import annotations

from urllib.parse import quote

import click

from vigil_cli.params import as_json, job_id, out
from vigil_cli.portal import find_portal, kind_of
from vigil_cli.tables import jobs as job_tables

checkpoint_name = click.argument(
    "name", metavar="CHECKPOINT", callback=lambda context, option, name: _checkpoint_name(name)
)


@click.command()
@job_id
@as_json
def checkpoints(job_id: int, as_json: bool) -> None:
    """List a job's checkpoints.

    To export a model in Hugging Face format, run `python -m training export FOLDER/job/checkpoints/NAME --hf MODEL` on
    a machine that sees the folder. The Checkpoints tab of the job's page has the line to copy.
    """
    portal = find_portal()
    found = list(portal.items(f"jobs/{job_id}/checkpoints", limit=200))
    out({"items": found}, lambda answer: job_tables.checkpoints(answer, kind_of(portal, job_id).unit), as_json)


@click.command()
@job_id
@checkpoint_name
@as_json
def pin(job_id: int, name: str, as_json: bool) -> None:
    """Pin a checkpoint so that it is never pruned."""
    _pin(job_id, name, True, as_json)


@click.command()
@job_id
@checkpoint_name
@as_json
def unpin(job_id: int, name: str, as_json: bool) -> None:
    """Unpin a checkpoint, so that it may be pruned again."""
    _pin(job_id, name, False, as_json)


def _checkpoint_name(checkpoint: str) -> str:
    """Return the checkpoint's name; a bare step number is accepted."""
    return f"step-{int(checkpoint)}" if checkpoint.isdecimal() else checkpoint


def _pin(job_id: int, name: str, pinned: bool, as_json: bool) -> None:
    address = f"jobs/{job_id}/checkpoints/{quote(name, safe='')}"
    found = find_portal().patch(address, json={"pinned": pinned})
    verb = "Pinned" if pinned else "Unpinned"
    out(found, lambda checkpoint: [f"{verb} {checkpoint['name']} of #{job_id}."], as_json)


ALL = (checkpoints, pin, unpin)
