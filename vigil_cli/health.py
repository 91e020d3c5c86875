"""Health on the command line: `vigil health` with `approve`, `dismiss`, `clear`, `rules` and `try`. No Django."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vigil_cli.params import Commands, as_json, confirm, out
from vigil_cli.portal import CliError, find_portal
from vigil_cli.tables.columns import local, table
from vigil_core import formatting

MAX_FINDINGS = 1_000
MAX_SINGLE = 5
"""More equal findings than this are one line, as on the page. REST calls a finding an entry."""
entry_id = click.argument("entry", metavar="ID", type=click.IntRange(min=1))
reason = click.option(
    "--reason", required=True, metavar="R", help="Why; it is kept with the finding and in the audit log."
)
alike = click.option("--alike", is_flag=True, help="Also all other findings of the rule that found the same.")
yes = click.option("--yes", is_flag=True, help="Decide about several findings without a question.")


with_all = click.option("--all", "everything", is_flag=True, help="Also findings that were cleared.")
with_node = click.option("--node", help="Only this node.")


@click.group(cls=Commands, invoke_without_command=True)
@with_all
@with_node
@as_json
@click.pass_context
def health(context: click.Context, everything: bool, node: str | None, as_json: bool) -> None:
    """List what health rules found on nodes and GPUs.

    What waits for a sysadmin comes first.
    """
    if context.invoked_subcommand is None:
        _print_findings(everything, node, as_json)


@health.command("list")
@with_all
@with_node
@as_json
def list_findings(everything: bool, node: str | None, as_json: bool) -> None:
    """List findings, as `vigil health` does."""
    _print_findings(everything, node, as_json)


def _print_findings(everything: bool, node: str | None, as_json: bool) -> None:
    portal = find_portal()
    found, has_more = _read_newest(node=node)
    if everything:
        cleared, has_more_cleared = _read_newest(node=node, state="cleared")
        found, has_more = found + cleared, has_more or has_more_cleared
    out({"items": found, "has_more": has_more, "breaker": portal.get("health/breaker")}, _lines, as_json)


@health.command()
@entry_id
@reason
@click.option("--replace", is_flag=True, help="Replace somebody else's drain.")
@alike
@yes
@as_json
def approve(entry: int, reason: str, replace: bool, alike: bool, yes: bool, as_json: bool) -> None:
    """Drain the node or keep jobs off it, as proposed (sysadmins)."""
    if alike and replace:
        raise click.UsageError("--replace is for one node: give either --alike or --replace.")
    if alike:
        _confirm_alike(entry, "approve", yes)
    _decide(entry, "approve", {"reason": reason, "replace": replace} | _alike(alike), as_json)


@health.command()
@entry_id
@reason
@alike
@yes
@as_json
def dismiss(entry: int, reason: str, alike: bool, yes: bool, as_json: bool) -> None:
    """Do nothing about a finding while it lasts (sysadmins)."""
    if alike:
        _confirm_alike(entry, "dismiss", yes)
    _decide(entry, "dismiss", {"reason": reason} | _alike(alike), as_json)


@health.command()
@entry_id
@reason
@alike
@yes
@as_json
def clear(entry: int, reason: str, alike: bool, yes: bool, as_json: bool) -> None:
    """Clear a finding whose cause was repaired (sysadmins).

    With VIGIL_HEALTH=act that may return the node to service.
    """
    if alike:
        _confirm_alike(entry, "clear", yes)
    _decide(entry, "clear", {"reason": reason} | _alike(alike), as_json)


@health.command()
@as_json
def rules(as_json: bool) -> None:
    """List the health rules: those that ship with Vigil and the site's."""
    out(find_portal().get("health/rules"), _rule_lines, as_json)


@health.command("try")
@click.argument("file", metavar="RULE.toml", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--days", type=click.IntRange(1, 30), default=30, show_default=True, help="How far back.")
@as_json
def try_rule(file: Path, days: int, as_json: bool) -> None:
    """Show what a rule would have found in the last 30 days (sysadmins).

    Nothing is changed. Exits with 1 if the rule is not valid.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{file} cannot be read: {error}") from None
    out(find_portal().post("health/rules/try", json={"toml": text, "days": days}), _dry_run_lines, as_json)


def _alike(wanted: bool) -> dict[str, bool]:
    return {"alike": True} if wanted else {}  # an older portal does not know it


def _confirm_alike(entry: int, action: str, is_confirmed: bool) -> None:
    """Ask before a decision about all entries like this one, with their number."""
    if is_confirmed:
        return
    first = find_portal().get(f"health/{entry}")
    found, has_more = _read_newest(rule=first["rule"], state=first["state"])
    number = sum(_group_key(other) == _group_key(first) for other in found)
    entries = formatting.plural(number, "finding")
    entries = f"{entries} or more" if has_more else entries
    question = f"{action.capitalize()} {entries} ({first['rule']}: {_title(first)})?"
    confirm(question, is_confirmed, f"Add --yes to {action} {entries}.")


def _decide(entry: int, action: str, body: dict[str, Any], as_json: bool) -> None:
    out(find_portal().post(f"health/{entry}/{action}", json=body), _decision_lines, as_json)


def _decision_lines(answer: dict[str, Any]) -> list[str]:
    lines = _lines({"items": [answer]})
    if answer.get("alike_decided"):
        lines.append(f"The same for {formatting.plural(answer['alike_decided'], 'other finding')}.")
    if answer.get("alike_left"):
        lines.append(f"Unchanged: {formatting.plural(answer['alike_left'], 'finding')}.")
    return lines


def _read_newest(**wanted: Any) -> tuple[list[dict[str, Any]], bool]:
    """Return the newest entries, and whether there are more."""
    portal = find_portal()
    answer = portal.get("health", limit=200, **wanted)
    found = list(answer["items"])
    while answer["next"] and len(found) < MAX_FINDINGS:
        answer = portal.get("health", limit=200, cursor=answer["next"], **wanted)
        found += answer["items"]
    return found, bool(answer["next"])


def _lines(answer: dict[str, Any]) -> list[str]:
    head = ["ID>", "SEVERITY", "NODE", "WHERE", "FINDING", "STATE", "ACTION", "DECISION", "COUNT>", "LAST SEEN"]
    groups: dict[object, list[dict[str, Any]]] = {}
    for entry in sorted(answer["items"], key=_urgency):
        groups.setdefault(_alike_key(entry), []).append(entry)
    rows = [
        [
            *(str(entry["id"]), entry["severity"], node, where, _title(entry), entry["state"]),
            *(entry["action"], _decision(entry), formatting.count(entry["count"]), local(entry["last_seen"])[:16]),
        ]
        for group in groups.values()
        for entry, node, where in _places(group)
    ]
    lines = table(head, rows, "No findings: nothing is wrong with the nodes that report.")
    if answer.get("has_more"):
        lines.append(
            f"There are more: only the newest {MAX_FINDINGS:,} are shown. Choose a node with --node, or see /health."
        )
    breaker = answer.get("breaker")
    if breaker and breaker["tripped_at"]:
        since = local(breaker["tripped_at"])[:16]
        lines.append(f"Automatic actions have been stopped since {since}: {breaker['detail']}")
        lines.append("A sysadmin can resume them on /health once the reason is known.")
    return lines


def _alike_key(entry: dict[str, Any]) -> object:
    """Return what entries on one line share; only those with a detail, such as an old version, are one line."""
    return _group_key(entry) if entry.get("detail") else entry["id"]


def _group_key(entry: dict[str, Any]) -> tuple[object, ...]:
    """Return what entries have in common about which one decision may be."""
    return tuple(entry.get(name) for name in ("state", "decision", "severity", "action", "rule", "detail"))


def _places(group: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str, str]]:
    """Return entries with node and place: one for many equal ones."""
    if len(group) <= MAX_SINGLE:
        return [(entry, entry["node"], _where(entry)) for entry in group]
    return [(group[0], f"{group[0]['node']} and {formatting.count(len(group) - 1)} more", "")]


def _title(entry: dict[str, Any]) -> str:
    return f"{entry['title']}: {entry['detail']}" if entry.get("detail") else str(entry["title"])


def _rule_lines(answer: dict[str, Any]) -> list[str]:
    head = ["NAME", "SEVERITY", "ACTION", "SIGNALS", "CLEARS", "TITLE"]
    rows = [
        [
            *(rule["name"], rule["severity"], rule["action"], ", ".join(rule["signals"])),
            *(rule["clears"], rule["title"] + _rule_mark(rule)),
        ]
        for rule in answer["items"]
    ]
    return table(head, rows, "No rules.")


def _rule_mark(rule: dict[str, Any]) -> str:
    words = ["site"] if rule["is_site"] else []
    words += ["unreadable"] if rule["problem"] else [] if rule["is_enabled"] else ["off"]
    return f" ({', '.join(words)})" if words else ""


def _dry_run_lines(answer: dict[str, Any]) -> list[str]:
    head = ["OPENED", "NODE", "WHERE", "OBSERVED", "CLEARED", "ACTION", "WOULD HAVE", "JOBS"]
    rows = [
        [
            *(local(entry["opened_at"])[:16], entry["node"], _where(entry), _observed(entry)),
            local(entry["cleared_at"])[:16] if entry["cleared_at"] else "still open",
            *(entry["action"], _OUTCOMES[entry["outcome"]], ", ".join(entry["jobs"])),
        ]
        for entry in answer["entries"]
    ]
    read = f"{formatting.count(answer['nodes_read'])} of {formatting.count(answer['nodes'])} nodes"
    lines = table(head, rows, f"The rule would have found nothing ({read} were read).")
    if answer["entries"]:
        drained = formatting.plural(answer["nodes_drained"], "node")
        found = formatting.plural(answer["found"], "finding")
        lines.append(f"{found}; Vigil would have drained {drained}. Read {read} in {answer['seconds']:.1f} s.")
    if len(answer["entries"]) < answer["found"]:
        lines.append(f"The first {len(answer['entries'])} are listed.")
    if answer["tripped_at"]:
        lines.append(f"The breaker would have stopped automatic actions at {local(answer['tripped_at'])[:16]}.")
    return [*lines, *([answer["cut"]] if answer["cut"] else []), *answer["untried"]]


_OUTCOMES = {"none": "", "drained": "drained", "already_drained": "been drained already", "held_back": "been held back"}


def _observed(entry: dict[str, Any]) -> str:
    fields = {name: value for name, value in entry["observed"].items() if name not in ("user", "program", "text")}
    if entry["signal"] in ("xid", "sxid"):
        return f"{'Xid' if entry['signal'] == 'xid' else 'SXid'} {fields.get('code', '–')}"
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def _where(entry: dict[str, Any]) -> str:
    return f"GPU {entry['gpu']}" if entry["gpu"] is not None else str(entry["item"])


def _decision(entry: dict[str, Any]) -> str:
    return f"{entry['decision']} by {entry['decided_by']}" if entry["decided_by"] else str(entry["decision"])


def _urgency(entry: dict[str, Any]) -> tuple[bool, int, int, int]:
    """Sort what waits for a sysadmin first, then by state and severity, the newest first."""
    states = ("open", "dismissed", "watching", "cleared")
    severities = ("fatal", "critical", "warning", "info")
    return (
        not (entry["state"] == "open" and entry["decision"] == "proposed"),
        states.index(entry["state"]) if entry["state"] in states else len(states),
        severities.index(entry["severity"]) if entry["severity"] in severities else len(severities),
        -int(entry["id"]),
    )


ALL = (health,)
