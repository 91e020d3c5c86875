"""SQLite's side of backup and restore: copied by its own online interface, put in place by a rename."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from portal.backup import files
from portal.backup.archive import Progress, room_for
from portal.run.preflight import StartRefused

PAGES = 2_000  # copied at a time


def copy(database: Path, target: Path, progress: Progress) -> None:
    """A consistent copy as of now, the write-ahead log included, while others write on."""
    if not database.exists():
        raise StartRefused(f"no such database: {database}: set VIGIL_HOME to the portal's, or start it once.")
    room_for(database.stat().st_size, target.parent)
    with closing(_open(database)) as source, closing(sqlite3.connect(target)) as copied:
        os.chmod(target, 0o600)
        size = source.execute("PRAGMA page_size").fetchone()[0]
        # One read transaction around all of it: or every write of another process would start the copy anew.
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM sqlite_master").fetchone()
        source.backup(
            copied, pages=PAGES, progress=lambda _, left, total: progress((total - left) * size, total * size)
        )
        source.rollback()
        found = copied.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise StartRefused(f"the database {database} is damaged ({found}): restore an older backup.")


def migrations(database: Path) -> dict[str, list[str]]:
    """The migrations that are applied, by app."""
    with closing(_open(database)) as connection:
        return by_app(connection.execute("SELECT app, name FROM django_migrations ORDER BY id").fetchall())


def by_app(rows: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for app, name in rows:
        found.setdefault(app, []).append(name)
    return found


def _open(database: Path) -> sqlite3.Connection:
    """Opens a database that is there; never makes one."""
    return sqlite3.connect(f"file:{quote(str(database))}?mode=rw", uri=True, timeout=20, isolation_level=None)


def put_in_place(staged: Path, database: Path, stamp: str) -> Path | None:
    """Let the staged database be the database; answers under which name the old one stays, if there was one.

    Until the last rename the old one is there whole, after it the new one. Nobody else may have it open.
    """
    aside = database.with_name(f"{database.name}.before-{stamp}")
    was_there = database.exists()
    if was_there:
        fold_log(database)
        os.link(database, aside)
    # What a broken or a removed database left of its log: it would be replayed into the new one.
    for end in ("-wal", "-shm", "-journal"):
        log = database.with_name(database.name + end)
        if log.exists():
            os.replace(log, aside.with_name(aside.name + end))
    files.sync(database.parent)
    os.replace(staged, database)
    files.sync(database.parent)
    return aside if was_there else None


def fold_log(database: Path) -> None:
    """Bring the write-ahead log into the database, so that one file holds all of it."""
    try:
        with closing(_open(database)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE").fetchone()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            raise StartRefused(f"another program has {database} open: stop it first.") from None
        # Broken, then: it is kept as it is.


def staging_path(staged: Path, database: Path) -> Path:
    """A copy on the database's own file system, where a rename can put it in place."""
    target = database.with_name(f"{database.name}.restoring")
    target.unlink(missing_ok=True)
    with closing(_open(staged)) as source, closing(sqlite3.connect(target)) as copied:
        os.chmod(target, 0o600)
        source.backup(copied)
    return target
