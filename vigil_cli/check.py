"""`vigil check portal` and `vigil check slurm` on the command line: passed on to the portal. No Django."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

import click

from vigil_cli.portal import CHECKOUT, Trouble


@click.group()
def check() -> None:
    """Check what Vigil depends on. On the portal's own machine."""


@check.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def portal(as_json: bool) -> None:
    """Say whether the portal itself works: its processes, Redis, database, disks, clocks and backups.

    Run it where the portal runs, as its Unix user, with its own settings; it needs no web process. ✓ well, ! look at
    it, ✗ mend it. Leaves with 1 if anything is to be mended.
    """
    _refuse_others()
    _manage("check_portal", ["--json"] if as_json else [])


@check.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--partition", multiple=True, metavar="P", help="Only jobs on this one; may be repeated.")
@click.option("--user", metavar="NAME", help="Run the jobs as this person, or Slurm user.")
@click.option("--wait", type=click.FloatRange(min=5), metavar="SECONDS", help="For each job to start; default 120.")
@click.option("--no-jobs", is_flag=True, help="Ask only; run nothing on the nodes.")
def slurm(as_json: bool, partition: tuple[str, ...], user: str | None, wait: float | None, no_jobs: bool) -> None:
    """Say line by line whether Vigil and its Slurm fit together, and what is missing.

    Run it where the worker runs, as the worker's Unix user, with the portal's own settings. It asks slurmrestd, and
    runs a small job on each partition. ✓ well, ! look at it, ✗ mend it, – could not be looked at. Leaves with 1 if
    anything is to be mended.
    """
    _refuse_others()
    words = [*(["--json"] if as_json else []), *(["--no-jobs"] if no_jobs else [])]
    words += [f"--partition={one}" for one in partition]
    words += [f"--user={user}"] if user else []
    words += [f"--wait={wait}"] if wait else []
    _manage("check_slurm", words)


def _manage(command: str, words: list[str]) -> None:
    sys.stdout.flush()
    # In its place, so that Ctrl-C reaches what has jobs to cancel and folders to remove, and nothing else.
    os.execv(sys.executable, [sys.executable, str(CHECKOUT / "manage.py"), command, *words])


def _refuse_others() -> None:
    """Refuses others than the worker's user: they would prove nothing, and could leave files that it cannot write."""
    home = Path(os.environ.get("VIGIL_HOME") or CHECKOUT / "var")
    if not home.exists() or home.stat().st_uid == os.geteuid():
        return
    try:
        owner = pwd.getpwuid(home.stat().st_uid).pw_name
    except KeyError:
        owner = f"#{home.stat().st_uid}"
    raise Trouble(f"VIGIL_HOME={home} belongs to {owner}. Run this as that user: sudo -u {owner} vigil check ….")
