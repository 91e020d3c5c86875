"""The cluster on the command line: `vigil nodes`, `node`, `drain`, `undrain`, `queue` and `licenses`. No Django."""

from __future__ import annotations

import json
from typing import Any

import click

from vigil_cli import cluster_tables
from vigil_cli.params import as_json, limit_option, node_names, out, single_node
from vigil_cli.portal import find_portal, node_path
from vigil_cli.tables import local
from vigil_cli.terminal import echo

REPLACE = "Replace somebody else's drain. Required in scripts; at a terminal you are asked."
END_OTHERS = (
    "Also end a drain of somebody else, a health rule or Slurm. Required in scripts; at a terminal you are asked."
)


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
@node_names
@click.option("--reason", required=True, metavar="R", help="The reason that the scheduler shows; your name is added.")
@click.option("--replace", is_flag=True, help=REPLACE)
@click.option("--yes", is_flag=True, help="Drain several nodes without a question.")
@as_json
def drain(nodes: tuple[str, ...], reason: str, replace: bool, yes: bool, as_json: bool) -> None:
    """Drain nodes: no new jobs start there (sysadmins).

    Running jobs continue. Waits up to 30 s for the scheduler to confirm, and
    exits with 1 if it has not.

    NODES are names and host expressions such as dgx[01-16,20]. For several
    nodes, what that hits is shown first; the command ends as soon as all are
    requested, and exits with 1 if one was refused. `vigil drains` shows when
    the scheduler has done it.
    """
    if (node := single_node(nodes)) is None:
        from vigil_cli.bulk_drain import drain_many

        drain_many(find_portal(), ",".join(nodes), reason, replace=replace, is_confirmed=yes, as_json=as_json)
        return
    _order(node, "drain", {"reason": reason, "replace": replace}, as_json)


@click.command()
@node_names
@click.option("--reason", metavar="R", help="Why; kept in the audit log. Required for several nodes.")
@click.option("--replace", is_flag=True, help=END_OTHERS)
@click.option("--yes", is_flag=True, help="Return several nodes without a question.")
@as_json
def undrain(nodes: tuple[str, ...], reason: str | None, replace: bool, yes: bool, as_json: bool) -> None:
    """Return drained nodes to service (sysadmins).

    NODES are names and host expressions such as dgx[01-16,20]. For several, the
    same as `vigil drains return`.
    """
    if (node := single_node(nodes)) is None:
        from vigil_cli.drains import return_many

        if not reason:
            raise click.UsageError("Give a --reason for several nodes.")
        return_many(find_portal(), ",".join(nodes), reason, replace=replace, is_confirmed=yes, as_json=as_json)
        return
    _order(node, "undrain", {"replace": replace} | ({"reason": reason} if reason else {}), as_json)


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


ALL = (nodes, node, drain, undrain, queue, licenses)


def _order(name: str, action: str, body: dict[str, Any], as_json: bool) -> None:
    """Place the order and wait for the scheduler; exit with code 1 if it refused or has not answered yet."""
    from vigil_cli import drain as ordering

    order = ordering.carry_out(find_portal(), node_path(name), action, body)
    if as_json:
        click.echo(json.dumps(order, indent=2))
    raise click.exceptions.Exit(0 if order["state"] == "done" else 1)


def _note_silence(reading: dict[str, Any]) -> None:
    """Warn on stderr that the scheduler does not answer, so that stdout stays parseable."""
    if reading["error"]:
        since = f"Showing its answer from {local(reading['read_at'])}. " if reading["read_at"] else ""
        echo(f"vigil: the scheduler does not answer. {since}{reading['error']}", err=True)
