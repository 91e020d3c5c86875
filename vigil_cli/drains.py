"""`vigil drains`: nodes out of service, who took each out, and whether the reason still stands. No Django."""

from __future__ import annotations

from typing import Any

import click

from vigil_cli.cluster_tables import as_of
from vigil_cli.params import as_json, out
from vigil_cli.portal import find_portal
from vigil_cli.tables import local, table
from vigil_core import formatting

STANDING = {"over": "no longer true", "stands": "still true", "unknown": "not checked"}


@click.command()
@as_json
def drains(as_json: bool) -> None:
    """List nodes out of service: who took them out, and why."""
    portal = find_portal()
    found = portal.get("drains", limit=200)
    items = list(found["items"])
    while found["next"]:
        found = portal.get("drains", limit=200, cursor=found["next"])
        items += found["items"]
    out({"items": items, "reading": found["reading"]}, _lines, as_json)


def _lines(answer: dict[str, Any]) -> list[str]:
    head = ["NODE", "STATE", "BY", "SINCE", "REASON", "STANDING", "IDLE GPUS>", "COST/H>", "SINCE THEN"]
    rows = [
        [
            *(drain["node"], formatting.word(drain["state"]), _holder(drain), local(drain["since"])[:16]),
            *(drain["reason"], STANDING.get(drain["standing"], drain["standing"]), str(drain["idle_gpus"])),
            *(_cost(drain), "; ".join(drain["facts"])),
        ]
        for drain in answer["items"]
    ]
    return [*table(head, rows, "All nodes are in service."), as_of(answer["reading"])]


def _holder(drain: dict[str, Any]) -> str:
    name = str(drain["holder_name"])
    return f"rule {name}" if drain["holder"] == "rule" else name or str(drain["holder"])


def _cost(drain: dict[str, Any]) -> str:
    cost = drain["cost_per_hour"]
    return "" if cost is None else formatting.money(cost, drain["currency"]).replace(formatting.NBSP, " ")


ALL = (drains,)
