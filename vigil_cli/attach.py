"""`vigil attach`: track a run that sbatch started, from inside its script or from elsewhere. No Django here."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import click

from vigil_cli.params import as_json, out
from vigil_cli.portal import CliError, Portal, find_portal

CONFIRMED_WITHIN_S = 10.0
_COMMAND = "vigil_cli.attach.command"
_NUMBER = re.compile(r"[1-9][0-9]{0,9}(_[0-9]{1,9})?\Z", re.ASCII)


class _Attach(click.Command):
    """Leave everything after `--` unparsed: it is the user's command."""

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
@click.option("--name", help="Name in Vigil; default: its name in Slurm.")
@click.option("--project", help="Project's short name; default: `default`, or your only project.")
@click.option("--tag", "tags", multiple=True, help="May be repeated.")
@click.option("--notes", help="Notes about the job.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for COMMAND's reports; default: .vigil here. All its nodes must see it.",
)
@as_json
def attach(
    number: str | None,
    directory: Path | None,
    as_json: bool,
    tags: tuple[str, ...],
    **details: str | None,
) -> None:
    """Track a run that sbatch started.

    In a batch script, put it before the training command. The run appears in Vigil, live, with what it reports through
    vigil_report:

      vigil attach -- srun python train.py

    COMMAND runs as it would without Vigil: its exit code is passed through, signals are forwarded, and an unreachable
    portal neither stops nor delays it. From anywhere else, for a pending or running job of yours:

      vigil attach 12345

    Vigil tracks its state, why it is pending, its requeues and its end. It never resubmits it.
    """
    body: dict[str, Any] = {name: value for name, value in details.items() if value} | (
        {"tags": list(tags)} if tags else {}
    )
    command: list[str] | None = click.get_current_context().meta.get(_COMMAND)
    if command is None:
        _follow(_valid_number(number), body, as_json)
        return
    if number is not None or not command:
        raise click.UsageError("Write `vigil attach -- COMMAND`, or `vigil attach NUMBER`.")
    from vigil_cli import attach_wrapper

    raise click.exceptions.Exit(attach_wrapper.run(command, body, directory))


def _valid_number(number: str | None) -> str:
    if number is None:
        raise click.UsageError("Name the job: `vigil attach NUMBER`; in a batch script: `vigil attach -- COMMAND`.")
    if not _NUMBER.match(number):
        remedy = f"A command comes after --: vigil attach -- {number} …"
        raise click.UsageError(f"{number!r} is not a Slurm job number. {remedy}")
    return number


def _follow(number: str, body: dict[str, Any], as_json: bool) -> None:
    """Attach the job and wait briefly for Slurm to confirm its owner; exit with 1 if it is somebody else's."""
    portal = find_portal()
    job = portal.post("jobs/attach", json={"scheduler_id": number, **body})["job"]
    job = _wait_for_owner(portal, job)
    attempt = job["attempt"]
    if attempt["cause"] == "rejected":
        raise CliError(job["reason"])
    message = f"Slurm job {number} is now tracked as #{job['id']} {job['name']}: {job['url']}"
    if attempt["submitted_at"] is None:
        message += " Waiting for Slurm to confirm that it is yours."
    out(job, lambda job: [message], as_json)


def _wait_for_owner(portal: Portal, job: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + CONFIRMED_WITHIN_S
    while job["attempt"]["submitted_at"] is None and not job["over"] and time.monotonic() < deadline:
        time.sleep(0.5)
        job = portal.get(f"jobs/{job['id']}")
    return job
