"""Maintenance windows on the command line: `vigil maintenance` with `list`, `plan` and `cancel`. No Django."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import click

from vigil_cli.params import Commands, as_json, node_names, out
from vigil_cli.portal import find_portal
from vigil_cli.tables.columns import local, table
from vigil_cli.times import UNTIL, Duration, MomentParam


@click.group(cls=Commands, invoke_without_command=True)
@click.option("--all", "everything", is_flag=True, help="Also windows that are over.")
@as_json
@click.pass_context
def maintenance(context: click.Context, everything: bool, as_json: bool) -> None:
    """List planned maintenance of nodes."""
    if context.invoked_subcommand is None:
        _print_windows(everything, as_json)


@maintenance.command("list")
@click.option("--all", "everything", is_flag=True, help="Also windows that are over.")
@as_json
def list_windows(everything: bool, as_json: bool) -> None:
    """List windows that are planned or have begun."""
    _print_windows(everything, as_json)


@maintenance.command()
@node_names
@click.option(
    "--from", "starts_at", type=MomentParam(), default="now", is_eager=True, metavar="T", help="When; by default now."
)
@click.option("--until", "ends_at", type=UNTIL, metavar="T", help="When it ends; or give --for.")
@click.option("--for", "seconds", type=Duration(), metavar="D", help="How long: 90m, 4h or 2d.")
@click.option("--reason", required=True, metavar="R", help="What is done; everybody sees it.")
@click.option("--reserve", is_flag=True, help="Reserve the nodes in Slurm instead of draining them.")
@as_json
def plan(
    nodes: tuple[str, ...], starts_at: datetime, ends_at: datetime | None, seconds: int | None, reason: str,
    reserve: bool, as_json: bool,
) -> None:  # fmt: skip
    """Plan maintenance of NODES (sysadmins).

    NODES are names and host expressions such as dgx[01-16,20]. A time is
    22:00, '2026-12-01 22:00' or +4h. Meanwhile no new job starts there and no
    health rule acts. With --reserve, Slurm starts no job that would still run
    when the window begins.
    """
    if (ends_at is None) == (seconds is None):
        raise click.UsageError("Give either --until or --for.")
    try:
        end = ends_at or starts_at + timedelta(seconds=seconds or 0)
    except OverflowError:
        raise click.BadParameter("The end is after the year 9999.", param_hint="'--for'") from None
    times = {"starts_at": starts_at.isoformat(), "ends_at": end.isoformat()}
    body = {"nodes": ",".join(nodes), "reason": reason, "reserve": reserve, **times}
    window = find_portal().post("maintenance", json=body)
    out(window, lambda window: _lines({"items": [window]}), as_json)


@maintenance.command()
@click.argument("window", metavar="ID", type=click.IntRange(min=1))
@as_json
def cancel(window: int, as_json: bool) -> None:
    """Cancel or end a window now (sysadmins).

    What Vigil drained for it returns to service.
    """
    out(find_portal().post(f"maintenance/{window}/cancel"), lambda window: _lines({"items": [window]}), as_json)


def _print_windows(everything: bool, as_json: bool) -> None:
    wanted = {"all": "true" if everything else None, "limit": 200}
    out({"items": list(find_portal().items("maintenance", most=1_000, **wanted))}, _lines, as_json)


def _lines(answer: dict[str, Any]) -> list[str]:
    head = ["ID>", "STATE", "FROM", "UNTIL", "NODES", "REASON", "BY", "HOW", "NOTE"]
    rows = [
        [
            *(str(window["id"]), window["state"], local(window["starts_at"])[:16], local(window["ends_at"])[:16]),
            *(window["expression"], window["reason"], window["planned_by"] or ""),
            *("reserves" if window["wants_reservation"] or window["reservation"] else "drains", window["problem"]),
        ]
        for window in answer["items"]
    ]
    return table(head, rows, "No maintenance is planned.")


ALL = (maintenance,)
