"""Health entries on the command line: `vigil health` with `approve`, `dismiss`, `clear` and `rules`. No Django."""

from __future__ import annotations

from typing import Any

import click

from vigil_cli.params import as_json, out
from vigil_cli.portal import find_portal
from vigil_cli.tables import local, table
from vigil_core import formatting

MOST = 1_000
entry_id = click.argument("entry", metavar="ID", type=click.IntRange(min=1))
reason = click.option(
    "--reason", required=True, metavar="R", help="Why; it is kept with the entry and in the audit log."
)


@click.group(invoke_without_command=True)
@click.option("--all", "everything", is_flag=True, help="Also entries that were cleared.")
@click.option("--node", help="Only this node.")
@as_json
@click.pass_context
def health(context: click.Context, everything: bool, node: str | None, as_json: bool) -> None:
    """List what health rules found on nodes and GPUs.

    What waits for a sysadmin comes first.
    """
    if context.invoked_subcommand is not None:
        return
    portal = find_portal()
    found = _read_all(node=node)
    if everything:
        found += _read_all(node=node, state="cleared")
    out({"items": found, "breaker": portal.get("health/breaker")}, _lines, as_json)


@health.command()
@entry_id
@reason
@click.option("--replace", is_flag=True, help="Replace somebody else's drain.")
@as_json
def approve(entry: int, reason: str, replace: bool, as_json: bool) -> None:
    """Do what the rule proposes: drain the node (sysadmins)."""
    _decide(entry, "approve", {"reason": reason, "replace": replace}, as_json)


@health.command()
@entry_id
@reason
@as_json
def dismiss(entry: int, reason: str, as_json: bool) -> None:
    """Decide that nothing is to be done while it lasts (sysadmins)."""
    _decide(entry, "dismiss", {"reason": reason}, as_json)


@health.command()
@entry_id
@reason
@as_json
def clear(entry: int, reason: str, as_json: bool) -> None:
    """End the entry: the cause was repaired (sysadmins)."""
    _decide(entry, "clear", {"reason": reason}, as_json)


@health.command()
@as_json
def rules(as_json: bool) -> None:
    """List the health rules in force."""
    out(find_portal().get("health/rules"), _rule_lines, as_json)


def _decide(entry: int, action: str, body: dict[str, Any], as_json: bool) -> None:
    out(find_portal().post(f"health/{entry}/{action}", json=body), lambda answer: _lines({"items": [answer]}), as_json)


def _read_all(**wanted: Any) -> list[dict[str, Any]]:
    portal = find_portal()
    answer = portal.get("health", limit=200, **wanted)
    found = list(answer["items"])
    while answer["next"] and len(found) < MOST:
        answer = portal.get("health", limit=200, cursor=answer["next"], **wanted)
        found += answer["items"]
    return found


def _lines(answer: dict[str, Any]) -> list[str]:
    head = ["ID>", "SEVERITY", "NODE", "WHERE", "FINDING", "STATE", "ACTION", "DECISION", "COUNT>", "LAST SEEN"]
    entries = sorted(answer["items"], key=_urgency)
    rows = [
        [
            *(str(entry["id"]), entry["severity"], entry["node"], _where(entry), entry["title"], entry["state"]),
            *(entry["action"], _decision(entry), formatting.count(entry["count"]), local(entry["last_seen"])[:16]),
        ]
        for entry in entries
    ]
    lines = table(head, rows, "No findings: nothing is wrong with the nodes that report.")
    breaker = answer.get("breaker")
    if breaker and breaker["tripped_at"]:
        lines.append(f"Automatic actions are stopped since {local(breaker['tripped_at'])[:16]}: {breaker['detail']}")
    return lines


def _rule_lines(answer: dict[str, Any]) -> list[str]:
    head = ["NAME", "SEVERITY", "ACTION", "SIGNALS", "CLEARS", "TITLE"]
    rows = [
        [
            *(rule["name"], rule["severity"], rule["action"], ", ".join(rule["signals"])),
            *(rule["clears"], rule["title"] + (" (site)" if rule["is_site"] else "")),
        ]
        for rule in answer["items"]
    ]
    return table(head, rows, "No rules.")


def _where(entry: dict[str, Any]) -> str:
    return f"GPU {entry['gpu']}" if entry["gpu"] is not None else str(entry["item"])


def _decision(entry: dict[str, Any]) -> str:
    return f"{entry['decision']} by {entry['decided_by']}" if entry["decided_by"] else str(entry["decision"])


def _urgency(entry: dict[str, Any]) -> tuple[int, int, int]:
    states = ("open", "dismissed", "watching", "cleared")
    severities = ("fatal", "critical", "warning", "info")
    return (
        states.index(entry["state"]) if entry["state"] in states else len(states),
        severities.index(entry["severity"]) if entry["severity"] in severities else len(severities),
        -int(entry["id"]),
    )


ALL = (health,)
