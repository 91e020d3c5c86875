"""`vigil drains` and `vigil drains return`: nodes out of service, who took each out, and their return. No Django."""

from __future__ import annotations

import json
from typing import Any

import click

from vigil_cli.bulk_drain import problem_line
from vigil_cli.cluster_tables import as_of
from vigil_cli.params import Commands, as_json, confirm, node_names, out
from vigil_cli.portal import Portal, find_portal
from vigil_cli.tables import local, table
from vigil_cli.terminal import echo
from vigil_core import formatting

MAX_NAMED = 10
STANDING = {"over": "gone", "stands": "persists", "unknown": "not checked"}
"""Of the problem that the reason names."""


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
    out({"items": items, "reading": found["reading"]}, _lines, as_json)


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


def return_many(portal: Portal, nodes: str, reason: str, *, replace: bool, is_confirmed: bool, as_json: bool) -> None:
    """Undrain every node of the expression; exit with code 1 if a drain was left as it is."""
    found = portal.post("drains/return/preview", json={"nodes": nodes})
    for line in _preview_lines(found, replace=replace):
        echo(line.replace(formatting.NBSP, " "), err=True)
    affected = len(found["yours"]) + len(found["by_others"]) * replace
    if affected:
        many = formatting.plural(affected, "node").replace(formatting.NBSP, " ")
        confirm("Return them to service?", is_confirmed, f"Add --yes to return {many} to service.")
    replaces = found["reasons"] if replace else {}
    answer = portal.post("drains/return", json={"nodes": nodes, "reason": reason, "replaces": replaces})
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    in_service = set(found["in_service"])
    left = [item for item in answer["items"] if item["order"] is None and item["node"] not in in_service]
    for item in left:
        echo(problem_line(item, "end that", replace=replace), err=True)
    requested = formatting.plural(sum(item["order"] is not None for item in answer["items"]), "node")
    requested = requested.replace(formatting.NBSP, " ")
    echo(f"Requested the return of {requested}. `vigil drains` shows what is still out of service.", err=True)
    raise click.exceptions.Exit(1 if left else 0)


def _preview_lines(found: dict[str, Any], *, replace: bool) -> list[str]:
    """Return which drains would end, which would stay, and which nodes are in service already."""
    by_others = "Drained by others" if replace else "Drained by others: these stay without --replace"
    lines = _preview_group("Your drains", found["yours"]) + _preview_group(by_others, found["by_others"])
    if found["in_service"]:
        more = len(found["in_service"]) - MAX_NAMED
        names = [*found["in_service"][:MAX_NAMED], *([f"{more} more"] if more > 0 else [])]
        lines.append(f"In service already: {formatting.listed(names)}")
    return lines


def _preview_group(head: str, drained: list[dict[str, Any]]) -> list[str]:
    lines = [f"{head}:"] if drained else []
    for item in drained[:MAX_NAMED]:
        holder = f", by {_drained_by(item)}" if _drained_by(item) else ""
        jobs = ", jobs run there" if item["has_jobs"] else ""
        standing = f"problem {STANDING.get(item['standing'], item['standing'])}"
        lines.append(f"  {item['node']}: {item['reason'] or 'no reason'}{holder} ({standing}{jobs})")
    more = len(drained) - MAX_NAMED
    return lines + ([f"  and {formatting.count(more)} more"] if more > 0 else [])


def _lines(answer: dict[str, Any]) -> list[str]:
    head = ["NODE", "STATE", "BY", "SINCE", "REASON", "PROBLEM", "IDLE GPUS>", "COST/H>", "NOTES"]
    rows = [
        [
            *(drain["node"], formatting.word(drain["state"]), _drained_by(drain), local(drain["since"])[:16]),
            *(drain["reason"], STANDING.get(drain["standing"], drain["standing"]), str(drain["idle_gpus"])),
            *(_cost(drain), "; ".join(drain["facts"])),
        ]
        for drain in answer["items"]
    ]
    return [*table(head, rows, "All nodes are in service."), as_of(answer["reading"])]


def _drained_by(drain: dict[str, Any]) -> str:
    name = str(drain["holder_name"])
    approved = f", approved by {drain['approved_by']}" if drain.get("approved_by") else ""
    return f"rule {name}{approved}" if drain["holder"] == "rule" else name or str(drain["holder"])


def _cost(drain: dict[str, Any]) -> str:
    cost = drain["cost_per_hour"]
    return "" if cost is None else formatting.money(cost, drain["currency"]).replace(formatting.NBSP, " ")


ALL = (drains,)
