"""Sweeps on the command line: `vigil sweep` and `vigil sweeps`, and `vigil submit` with a sweep. No Django here."""

from __future__ import annotations

import json
from typing import Any

import click

from vigil_cli import watch
from vigil_cli.params import SweepId, as_json, limit_option, out
from vigil_cli.portal import Portal, find_portal
from vigil_cli.tables import jobs as job_tables
from vigil_cli.tables import sweeps as sweep_tables


@click.command()
@click.argument("sweep_id", metavar="ID", type=SweepId())
@click.option("--cancel", is_flag=True, help="Cancel all of its jobs; each saves a last checkpoint first.")
@click.option("--watch", "watched", is_flag=True, help="Wait until all jobs end; exit with 1 if one ends badly.")
@as_json
def sweep(sweep_id: int, cancel: bool, watched: bool, as_json: bool) -> None:
    """Show a sweep and its jobs."""
    portal = find_portal()
    message = f"Cancelling the jobs of sweep {sweep_id}."
    if cancel:
        found = portal.post(f"sweeps/{sweep_id}/cancel")
        if watched:
            follow(portal, found, as_json, lead=message)
        else:
            out(found, lambda found: [message], as_json)
    elif watched:
        follow(portal, portal.get(f"sweeps/{sweep_id}"), as_json)
    else:
        show(portal, portal.get(f"sweeps/{sweep_id}"), as_json)


@click.command()
@click.option("--project", multiple=True, help="Its short name; may be repeated.")
@click.option("--owner", help="A user name.")
@limit_option(20)
@as_json
def sweeps(limit: int, as_json: bool, **filters: Any) -> None:
    """List sweeps, newest first."""
    found = list(find_portal().items("sweeps", most=limit, limit=min(limit, 200), **filters))
    out({"items": found}, sweep_tables.sweeps, as_json)


def show(portal: Portal, found: dict[str, Any], as_json: bool, *, lead: str = "") -> None:
    """Print the sweep and each of its jobs."""
    jobs = list(portal.items("jobs", sweep=found["id"], sort="created", limit=200))
    out({**found, "items": jobs}, lambda answer: [*([lead] if lead else []), *sweep_tables.sweep(answer)], as_json)


def follow(portal: Portal, found: dict[str, Any], as_json: bool, *, lead: str = "") -> None:
    """Print the counts by state until all jobs are over; exit with code 1 if one ended badly."""
    screen = watch.Screen()
    screen.print_line(lead or f"Sweep {found['id']} {found['name']}: {found['url']}")

    def changed(now: dict[str, Any]) -> None:
        screen.print_line(f"sweep {now['id']} {job_tables.counts(now['counts'])}")
        if as_json:
            click.echo(json.dumps({"type": "progress", "sweep": now["id"], "counts": now["counts"]}))

    try:
        last = watch.poll_until(
            portal, f"sweeps/{found['id']}", is_over=lambda found: bool(found["over"]),
            key=lambda found: found["counts"], changed=changed, every_s=1.0,
        )  # fmt: skip
    except KeyboardInterrupt:
        screen.print_line(f"Sweep {found['id']} continues. Cancel it with `vigil sweep {found['id']} --cancel`.")
        raise click.exceptions.Exit(1) from None
    if as_json:
        click.echo(json.dumps(last))
    raise click.exceptions.Exit(0 if set(last["counts"]) <= {"completed"} else 1)


ALL = (sweep, sweeps)
