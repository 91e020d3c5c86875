"""Print nodes out of service: who drained them, and whether the problem persists. No Django here."""

from __future__ import annotations

from typing import Any

from vigil_cli.tables.cluster import as_of
from vigil_cli.tables.columns import local, table
from vigil_core import formatting

STANDING = {"over": "gone", "stands": "persists", "unknown": "not checked"}
"""Of the problem that the reason names."""


def drains(answer: dict[str, Any]) -> list[str]:
    head = ["NODE", "STATE", "BY", "SINCE", "REASON", "PROBLEM", "IDLE GPUS>", "COST/H>", "NOTES"]
    rows = [
        [
            *(drain["node"], formatting.word(drain["state"]), drained_by(drain), local(drain["since"])[:16]),
            *(drain["reason"], STANDING.get(drain["standing"], drain["standing"]), str(drain["idle_gpus"])),
            *(_cost(drain), "; ".join(drain["facts"])),
        ]
        for drain in answer["items"]
    ]
    return [*table(head, rows, "All nodes are in service."), as_of(answer["reading"])]


def drained_by(drain: dict[str, Any]) -> str:
    name = str(drain["holder_name"])
    approved = f", approved by {drain['approved_by']}" if drain.get("approved_by") else ""
    return f"rule {name}{approved}" if drain["holder"] == "rule" else name or str(drain["holder"])


def _cost(drain: dict[str, Any]) -> str:
    cost = drain["cost_per_hour"]
    return "" if cost is None else formatting.money(cost, drain["currency"])
