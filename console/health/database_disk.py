"""Find the data directory of a PostgreSQL server on this machine, or why its disk cannot be checked from here."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from django.db import DatabaseError, connection

TITLE = "The disk of the database is not checked: {}."


@dataclass(frozen=True)
class Unchecked:
    """Why the disk cannot be checked from here, and how to watch it instead."""

    why: str
    remedy: str


ELSEWHERE = Unchecked("its server is another machine", "Watch the free space of its data directory there.")
UNSEEN = Unchecked(
    "its folder is not visible to the portal",
    "The server runs in a container, or behind a tunnel: watch the free space of its data directory there.",
)
HIDDEN = Unchecked(
    "its server does not tell the portal where its folder is",
    "GRANT pg_read_all_settings TO the portal's database user, or watch the free space of the data directory yourself.",
)


_last: Path | Unchecked | None = None


def data_directory() -> Path | Unchecked | None:
    """Return where the server's files are, if that is on this machine.

    While it does not answer, perhaps because its disk is full, return its last answer; None if there was none.
    """
    global _last
    with suppress(DatabaseError):
        _last = _fetch_data_directory()
    return _last


def _fetch_data_directory() -> Path | Unchecked:
    connection.ensure_connection()
    if not is_local(connection.connection.info.host):
        return ELSEWHERE
    with connection.cursor() as cursor:
        # This view omits settings that are hidden from the user; SHOW would raise an error.
        cursor.execute("SELECT setting FROM pg_settings WHERE name = 'data_directory'")
        row = cursor.fetchone()
    return Path(row[0]) if row else HIDDEN


def is_local(host: str) -> bool:
    """Return whether libpq's host is this machine: a folder of sockets, or the loopback address."""
    return host.startswith(("/", "@")) or host in {"", "localhost", "127.0.0.1", "::1"}
