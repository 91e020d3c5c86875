"""`vigil check portal` and `vigil check slurm` on the command line: passed on to manage.py. No Django here."""

from __future__ import annotations

import os
import pwd
import sys

import click

from vigil_cli.params import Commands, as_json
from vigil_cli.portal import CliError
from vigil_cli.site import needs_site
from vigil_core import installation


@click.group(cls=Commands)
def check() -> None:
    """Check what Vigil depends on. Run it on the portal's own machine."""


@check.command()
@as_json
def portal(as_json: bool) -> None:
    """Check the portal itself: processes, Redis, database, disks, clocks and backups.

    Run it where the portal runs, as its Unix user, with its settings; it needs no web process. ✓ OK, ! warning,
    ✗ error. Exits with 1 if there is an error.
    """
    _refuse_others()
    _manage("check_portal", ["--json"] if as_json else [])


@check.command()
@as_json
@click.option("--partition", multiple=True, metavar="P", help="Test only this partition; may be repeated.")
@click.option("--user", metavar="NAME", help="Run the jobs as this person or Slurm user.")
@click.option(
    "--wait",
    type=click.FloatRange(min=5),
    metavar="SECONDS",
    help="How long to wait for each job to start; default 120.",
)
@click.option("--no-jobs", is_flag=True, help="Only query; run nothing on the nodes.")
def slurm(as_json: bool, partition: tuple[str, ...], user: str | None, wait: float | None, no_jobs: bool) -> None:
    """Check line by line whether Vigil works with this Slurm, and what is missing.

    Run it where the worker runs, as the worker's Unix user, with the portal's settings. It queries slurmrestd and runs
    a small job on each partition. ✓ OK, ! warning, ✗ error, – not checked. Exits with 1 if there is an error.
    """
    _refuse_others()
    arguments = [*(["--json"] if as_json else []), *(["--no-jobs"] if no_jobs else [])]
    arguments += [f"--partition={name}" for name in partition]
    arguments += [f"--user={user}"] if user else []
    arguments += [f"--wait={wait}"] if wait else []
    _manage("check_slurm", arguments)


def _manage(command: str, arguments: list[str]) -> None:
    needs_site(command.replace("_", " "))
    sys.stdout.flush()
    # Replace this process, so that Ctrl-C reaches only the one that has jobs to cancel and folders to remove.
    os.execv(sys.executable, installation.manage(command, *arguments))


def _refuse_others() -> None:
    """Refuse other users than the worker's: they prove nothing, and could leave files that it cannot write."""
    home = installation.default_home()
    if not home.exists() or home.stat().st_uid == os.geteuid():
        return
    try:
        owner = pwd.getpwuid(home.stat().st_uid).pw_name
    except KeyError:
        owner = f"#{home.stat().st_uid}"
    raise CliError(f"VIGIL_HOME={home} belongs to {owner}. Run this as that user: sudo -u {owner} vigil check ….")
