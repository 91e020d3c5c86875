"""Hot spares on the command line: `vigil spares` with `list`, `add` and `remove`. No Django."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from vigil_cli.params import Commands, as_json, out
from vigil_cli.portal import find_portal
from vigil_cli.tables.columns import local, table


@click.group(cls=Commands, invoke_without_command=True)
@as_json
@click.pass_context
def spares(context: click.Context, as_json: bool) -> None:
    """List hot spares, which stand by for other nodes."""
    if context.invoked_subcommand is None:
        _print_spares(as_json)


@spares.command("list")
@as_json
def list_spares(as_json: bool) -> None:
    """List the hot spares and what each of them does now."""
    _print_spares(as_json)


@spares.command()
@click.argument("node")
@click.option("--partition", required=True, metavar="P", help="The partition whose nodes NODE replaces. NODE is in it.")
@as_json
def add(node: str, partition: str, as_json: bool) -> None:
    """Keep NODE drained until another node fails (sysadmins).

    Running jobs continue. When a node of the partition fails, the spare takes
    its place, and the repaired node is the next spare.
    """
    spare = find_portal().post("spares", json={"node": node, "partition": partition})
    done = f"{spare['node']} is a spare of {spare['partition']}. Vigil drains it within seconds."
    out(spare, lambda _: [done], as_json)


@spares.command()
@click.argument("node")
@as_json
def remove(node: str, as_json: bool) -> None:
    """Make NODE an ordinary node again (sysadmins).

    It returns to service if only that kept it drained.
    """
    find_portal().post(f"spares/{quote(node, safe='')}/remove")
    out({"node": node, "removed": True}, lambda _: [f"{node} is no longer a hot spare."], as_json)


def _print_spares(as_json: bool) -> None:
    out({"items": list(find_portal().items("spares", most=1_000, limit=200))}, _lines, as_json)


def _lines(answer: dict[str, Any]) -> list[str]:
    head = ["NODE", "PARTITION", "STATE", "SINCE", "BY"]
    rows = [
        [spare["node"], spare["partition"], _state(spare), local(spare["since"])[:16], spare["added_by"] or ""]
        for spare in answer["items"]
    ]
    return table(head, rows, "No hot spares. `vigil spares add NODE --partition P` names one.")


def _state(spare: dict[str, Any]) -> str:
    if spare["state"] != "serving":
        return "stands by"
    return f"in place of {spare['replaces']}" if spare["replaces"] else "in service: a person undrained it"


ALL = (spares,)
