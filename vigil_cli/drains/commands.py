"""Draining on the command line: `vigil drain`, `undrain`, and `drains` with `list` and `return`. No Django."""

from __future__ import annotations

import json
from typing import Any

import click

from vigil_cli.drains.many import drain_many, return_many
from vigil_cli.drains.one_node import carry_out
from vigil_cli.params import Commands, as_json, node_names, out, single_node
from vigil_cli.portal import find_portal, node_path
from vigil_cli.tables import drains as drain_tables

REPLACE = "Replace somebody else's drain. Required in scripts; at a terminal you are asked."
END_OTHERS = (
    "Also end a drain of somebody else, a health rule or Slurm. Required in scripts; at a terminal you are asked."
)


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
        if not reason:
            raise click.UsageError("Give a --reason for several nodes.")
        return_many(find_portal(), ",".join(nodes), reason, replace=replace, is_confirmed=yes, as_json=as_json)
        return
    _order(node, "undrain", {"replace": replace} | ({"reason": reason} if reason else {}), as_json)


@click.group(cls=Commands, invoke_without_command=True)
@as_json
@click.pass_context
def drains(context: click.Context, as_json: bool) -> None:
    """List nodes out of service: who took them out, and why.

    Those whose problem is gone come first, then those that cost most.
    """
    if context.invoked_subcommand is None:
        _print_drains(as_json)


@drains.command("list")
@as_json
def list_drains(as_json: bool) -> None:
    """List nodes out of service, as `vigil drains` does."""
    _print_drains(as_json)


def _print_drains(as_json: bool) -> None:
    portal = find_portal()
    found = portal.get("drains", limit=200)
    items = list(found["items"])
    while found["next"]:
        found = portal.get("drains", limit=200, cursor=found["next"])
        items += found["items"]
    items.sort(key=lambda drain: (drain["standing"] != "over", -drain["idle_gpus"], drain["node"]))
    out({"items": items, "reading": found["reading"]}, drain_tables.drains, as_json)


@drains.command("return")
@node_names
@click.option("--reason", required=True, metavar="R", help="Why they return; it is kept in the audit log.")
@click.option("--replace", is_flag=True, help="Also end drains of other people, health rules and Slurm.")
@click.option("--yes", is_flag=True, help="Return them without a question.")
@as_json
def return_nodes(nodes: tuple[str, ...], reason: str, replace: bool, yes: bool, as_json: bool) -> None:
    """Return nodes to service (sysadmins).

    NODES are names and host expressions such as dgx[01-16,20]. Whose drains
    that ends is shown first. `vigil burnin` tests nodes and returns those that
    pass.
    """
    return_many(find_portal(), ",".join(nodes), reason, replace=replace, is_confirmed=yes, as_json=as_json)


ALL = (drain, undrain, drains)


def _order(name: str, action: str, body: dict[str, Any], as_json: bool) -> None:
    """Place the order and wait for the scheduler; exit with code 1 if it refused or has not answered yet."""
    order = carry_out(find_portal(), node_path(name), action, body)
    if as_json:
        click.echo(json.dumps(order, indent=2))
    raise click.exceptions.Exit(0 if order["state"] == "done" else 1)
