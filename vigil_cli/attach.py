"""`vigil attach`: have a run that sbatch started followed, from in its script or from anywhere else. No Django here."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import click

from vigil_cli.params import as_json, out
from vigil_cli.portal import Portal, Trouble, find_portal

CONFIRMED_WITHIN_S = 10.0
_COMMAND = "vigil_cli.attach.command"
_NUMBER = re.compile(r"[1-9][0-9]{0,9}(_[0-9]{1,9})?\Z", re.ASCII)


class _Attach(click.Command):
    """What follows -- is a command of somebody else's, and none of its words are ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "NUMBER | -- COMMAND…"]


@click.command(cls=_Attach)
@click.argument("number", required=False)
@click.option("--name", help="Its name in Vigil; default: its name in Slurm.")
@click.option("--project", help="Its short name; default: `default`, or your only one.")
@click.option("--tag", "tags", multiple=True, help="May be repeated.")
@click.option("--notes", help="Words for later.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where COMMAND's reports are kept; default: .vigil here. All its nodes must see it.",
)
@as_json
def attach(
    number: str | None,
    directory: Path | None,
    as_json: bool,
    tags: tuple[str, ...],
    **words: str | None,
) -> None:
    """Follow a run that sbatch started.

    In a batch script, before what trains; the run shows in Vigil, live with what it reports by vigil_report:

        vigil attach -- srun python train.py

    COMMAND runs as it would without: its exit code is this one's, signals are passed on, and a portal that is away
    neither stops nor delays it. From anywhere else, of a job of yours that waits or runs already:

        vigil attach 12345

    Vigil follows its state, why it waits, its requeues and its end. It never submits it anew.
    """
    body: dict[str, Any] = {name: word for name, word in words.items() if word} | ({"tags": list(tags)} if tags else {})
    command: list[str] | None = click.get_current_context().meta.get(_COMMAND)
    if command is None:
        _follow(_checked(number), body, as_json)
        return
    if number is not None or not command:
        raise click.UsageError("Write `vigil attach -- COMMAND`, or `vigil attach NUMBER`.")
    from vigil_cli import attach_wrapper

    raise click.exceptions.Exit(attach_wrapper.run(command, body, directory))


def _checked(number: str | None) -> str:
    if number is None:
        raise click.UsageError("Say which job: `vigil attach NUMBER`; in its script `vigil attach -- COMMAND`.")
    if not _NUMBER.match(number):
        remedy = f"A command comes after --: vigil attach -- {number} …"
        raise click.UsageError(f"{number!r} is no job's number in Slurm. {remedy}")
    return number


def _follow(number: str, body: dict[str, Any], as_json: bool) -> None:
    """Ask for it, and wait a moment for Slurm to say whose it is; leaves with 1 where it is not this person's."""
    portal = find_portal()
    job = portal.post("jobs/attach", json={"scheduler_id": number, **body})["job"]
    job = _confirmed(portal, job)
    attempt = job["attempt"]
    if attempt["cause"] == "rejected":
        raise Trouble(job["reason"])
    said = f"Slurm's job {number} is followed as #{job['id']} {job['name']}: {job['url']}"
    if attempt["submitted_at"] is None:
        said += " Slurm has yet to say that it is yours."
    out(job, lambda job: [said], as_json)


def _confirmed(portal: Portal, job: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + CONFIRMED_WITHIN_S
    while job["attempt"]["submitted_at"] is None and not job["over"] and time.monotonic() < deadline:
        time.sleep(0.5)
        job = portal.get(f"jobs/{job['id']}")
    return job
