"""`vigil announcements` with `list`, `add` and `withdraw`: short texts that everybody sees. No Django."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from vigil_cli.params import Commands, as_json, out
from vigil_cli.portal import find_portal
from vigil_cli.tables.columns import local, table
from vigil_cli.times import UNTIL, MomentParam

with_all = click.option(
    "--all", "everything", is_flag=True, help="Also past ones; for sysadmins also planned and withdrawn ones."
)


@click.group(cls=Commands, invoke_without_command=True)
@with_all
@as_json
@click.pass_context
def announcements(context: click.Context, everything: bool, as_json: bool) -> None:
    """List what sysadmins announce to everybody."""
    if context.invoked_subcommand is None:
        _print_announcements(everything, as_json)


@announcements.command("list")
@with_all
@as_json
def list_announcements(everything: bool, as_json: bool) -> None:
    """List what is announced now."""
    _print_announcements(everything, as_json)


@announcements.command()
@click.argument("text")
@click.option(
    "--level", type=click.Choice(["info", "warning", "critical"]), default="info", show_default=True,
    help="How urgent it is.",
)  # fmt: skip
@click.option(
    "--from", "starts_at", type=MomentParam(), is_eager=True, metavar="T", help="When it appears; by default now."
)
@click.option("--until", "ends_at", type=UNTIL, metavar="T", help="When it ends; else until withdrawn.")
@as_json
def add(text: str, level: str, starts_at: datetime | None, ends_at: datetime | None, as_json: bool) -> None:
    """Announce TEXT to everybody (sysadmins).

    It is shown on the home page, on the submit page, and once per command of
    `vigil`. A time is 22:00, '2026-12-01 22:00' or +4h.
    """
    times = {"starts_at": starts_at and starts_at.isoformat(), "ends_at": ends_at and ends_at.isoformat()}
    found = find_portal().post("announcements", json={"text": text, "level": level, **times})
    out(found, lambda row: _lines({"items": [row]}), as_json)


@announcements.command()
@click.argument("announcement", metavar="ID", type=click.IntRange(min=1))
@as_json
def withdraw(announcement: int, as_json: bool) -> None:
    """End an announcement before its time (sysadmins)."""
    found = find_portal().post(f"announcements/{announcement}/withdraw")
    out(found, lambda row: _lines({"items": [row]}), as_json)


def _print_announcements(everything: bool, as_json: bool) -> None:
    wanted = {"all": "true" if everything else None, "limit": 200}
    out({"items": list(find_portal().items("announcements", most=1_000, **wanted))}, _lines, as_json)


def _lines(answer: dict[str, Any]) -> list[str]:
    head = ["ID>", "LEVEL", "FROM", "UNTIL", "SHOWN", "BY", "TEXT"]
    rows = [
        [
            *(str(row["id"]), row["level"], local(row["starts_at"])[:16]),
            *(_until(row), "yes" if row["is_shown"] else "no", row["written_by"] or "", row["text"]),
        ]
        for row in answer["items"]
    ]
    return table(head, rows, "Nothing is announced.")


def _until(row: dict[str, Any]) -> str:
    if row["withdrawn_at"]:
        return f"withdrawn {local(row['withdrawn_at'])[:16]}"
    return local(row["ends_at"])[:16] if row["ends_at"] else "until withdrawn"


ALL = (announcements,)
