"""`vigil notices`: your notifications, and marking them as read. No Django here."""

from __future__ import annotations

import json

import click

from vigil_cli.params import as_json, limit_option, out
from vigil_cli.portal import find_portal
from vigil_cli.tables import portal as portal_tables
from vigil_cli.terminal import echo


@click.command()
@click.option("--unread", is_flag=True, help="Only unread notifications.")
@limit_option(50)
@click.option(
    "--read", "read", multiple=True, type=click.IntRange(min=1), metavar="ID", help="Mark as read; may be repeated."
)
@as_json
def notices(unread: bool, limit: int, read: tuple[int, ...], as_json: bool) -> None:
    """List active notifications, newest first.

    An asterisk marks unread ones.
    """
    portal = find_portal()
    if read:
        for notice_id in read:
            notice = portal.post(f"notices/{notice_id}/read")
            echo(json.dumps(notice) if as_json else f"Marked {notice_id} as read: {notice['title']}")
        return
    found = list(portal.items("notices", most=limit, unread="true" if unread else None, limit=min(limit, 200)))
    out({"items": found}, portal_tables.notices, as_json)


ALL = (notices,)
