"""The cluster on the command line: `vigil nodes`, `node`, `drain`, `undrain`, `queue` and `licenses`. No Django."""

from __future__ import annotations

import json
from typing import Any

import click

from vigil_cli import cluster_tables
from vigil_cli.params import as_json, out
from vigil_cli.portal import find_portal
from vigil_cli.tables import local
from vigil_cli.terminal import echo

REPLACE = "Also where somebody else has drained it. At a terminal you are asked; a script needs this."


@click.command()
@click.option("--partition", help="Only those of this partition.")
@click.option("--state", help="Only those in this state: idle, mixed, allocated, drained, down …")
@as_json
def nodes(partition: str | None, state: str | None, as_json: bool) -> None:
    """List the nodes."""
    found = find_portal().get("nodes", partition=partition, state=state)
    _note_silence(found["reading"])
    if not found["items"] and not as_json and (partition or state):
        click.echo("No node is so. See them all with `vigil nodes`.")
        click.echo(cluster_tables.as_of(found["reading"]))
        return
    out(found, cluster_tables.nodes, as_json)


@click.command()
@click.argument("name")
@as_json
def node(name: str, as_json: bool) -> None:
    """Show one node."""
    found = find_portal().get(_node_path(name))
    _note_silence(found["reading"])
    out(found, cluster_tables.node, as_json)


@click.command()
@click.argument("name")
@click.option("--reason", required=True, metavar="R", help="What the scheduler shows; your name is added to it.")
@click.option("--replace", is_flag=True, help=REPLACE)
@as_json
def drain(name: str, reason: str, replace: bool, as_json: bool) -> None:
    """Let nothing new start on a node (sysadmins).

    What runs there goes on. Waits up to 30 s for what the scheduler says.
    """
    _order(name, "drain", {"reason": reason, "replace": replace}, as_json)


@click.command()
@click.argument("name")
@click.option("--replace", is_flag=True, help=REPLACE)
@as_json
def undrain(name: str, replace: bool, as_json: bool) -> None:
    """Let jobs start on a drained node again (sysadmins)."""
    _order(name, "undrain", {"replace": replace}, as_json)


@click.command()
@click.option("--state", multiple=True, help="pending, running, suspended or completing; may be repeated.")
@click.option("--partition", help="Only those of this partition.")
@click.option("--user", help="A Unix user.")
@click.option("--mine", is_flag=True, help="Only your own.")
@click.option("-q", "--search", "q", help="Words in the name; or the scheduler's number, a person, an account.")
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True)
@as_json
def queue(limit: int, mine: bool, as_json: bool, **filters: Any) -> None:
    """Show the scheduler's queue, everybody's jobs.

    Your own come first, then those that wait by priority, then those that run.
    """
    portal = find_portal()
    wanted = {**filters, "mine": "true" if mine else None, "limit": min(limit, 200)}
    page = portal.get("queue", **wanted)
    _note_silence(page["reading"])
    found = page["items"][:limit]
    while page["next"] and len(found) < limit:
        page = portal.get("queue", cursor=page["next"], **wanted)
        found += page["items"][: limit - len(found)]
    if not found and not as_json and (mine or any(filters.values())):
        click.echo("Nothing matches. See everything with `vigil queue`.")
        for line in cluster_tables.freshness(page):
            echo(line)
        return
    out(
        {"items": found} | {name: page[name] for name in ("reading", "unseen") if name in page},
        cluster_tables.queue,
        as_json,
    )


@click.command()
@as_json
def licenses(as_json: bool) -> None:
    """List Slurm's licences and how many are in use."""
    found = find_portal().get("licenses")
    _note_silence(found["reading"])
    out(found, cluster_tables.licenses, as_json)


ALL = (nodes, node, drain, undrain, queue, licenses)


def _order(name: str, action: str, body: dict[str, Any], as_json: bool) -> None:
    """Ask for it and wait for what the scheduler says; leaves with 1 where that is no, or nothing yet."""
    from vigil_cli import drain as ordering

    order = ordering.carry_out(find_portal(), _node_path(name), action, body)
    if as_json:
        click.echo(json.dumps(order, indent=2))
    raise click.exceptions.Exit(0 if order["state"] == "done" else 1)


def _node_path(name: str) -> str:
    from urllib.parse import quote

    return f"nodes/{quote(name, safe='')}"


def _note_silence(reading: dict[str, Any]) -> None:
    """Says on stderr that the scheduler does not answer, so that stdout stays what it is."""
    if reading["error"]:
        since = f"This is what it said at {local(reading['read_at'])}. " if reading["read_at"] else ""
        echo(f"vigil: the scheduler does not answer. {since}{reading['error']}", err=True)
