"""The cluster on the command line: `vigil nodes`, `node`, `queue` and `licenses`. No Django."""

from __future__ import annotations

from typing import Any

import click

from vigil_cli.params import as_json, limit_option, out
from vigil_cli.portal import find_portal, node_path
from vigil_cli.tables import cluster as cluster_tables
from vigil_cli.tables.columns import local
from vigil_cli.terminal import echo


@click.command()
@click.option("--partition", help="Only nodes of this partition.")
@click.option("--state", help="Only nodes in this state: idle, mixed, allocated, drained, down …")
@as_json
def nodes(partition: str | None, state: str | None, as_json: bool) -> None:
    """List the nodes."""
    found = find_portal().get("nodes", partition=partition, state=state)
    _note_silence(found["reading"])
    if not found["items"] and not as_json and (partition or state):
        click.echo("No matching nodes. `vigil nodes` lists all.")
        click.echo(cluster_tables.as_of(found["reading"]))
        return
    out(found, cluster_tables.nodes, as_json)


@click.command()
@click.argument("name")
@as_json
def node(name: str, as_json: bool) -> None:
    """Show one node."""
    found = find_portal().get(node_path(name))
    _note_silence(found["reading"])
    out(found, cluster_tables.node, as_json)


@click.command()
@click.option("--state", multiple=True, help="pending, running, suspended or completing; may be repeated.")
@click.option("--partition", help="Only jobs of this partition.")
@click.option("--user", help="A Unix user.")
@click.option("--mine", is_flag=True, help="Only your own jobs.")
@click.option("-q", "--search", "q", help="Search names, scheduler job ids, people and accounts.")
@limit_option(50)
@as_json
def queue(limit: int, mine: bool, as_json: bool, **filters: Any) -> None:
    """Show the scheduler's queue with everybody's jobs.

    Your own jobs come first, then pending jobs by priority, then running ones.
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
        click.echo("No matching jobs. `vigil queue` lists all.")
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
    """List Slurm's licenses and how many are in use."""
    found = find_portal().get("licenses")
    _note_silence(found["reading"])
    out(found, cluster_tables.licenses, as_json)


ALL = (nodes, node, queue, licenses)


def _note_silence(reading: dict[str, Any]) -> None:
    """Warn on stderr that the scheduler does not answer, so that stdout stays parseable."""
    if reading["error"]:
        since = f"Showing its answer from {local(reading['read_at'])}. " if reading["read_at"] else ""
        echo(f"vigil: the scheduler does not answer. {since}{reading['error']}", err=True)
