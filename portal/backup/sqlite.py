"""Back up and restore SQLite: copied by its online backup API, put in place by a rename."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from portal.backup import files
from portal.backup.archive import Progress, require_space
from portal.run.preflight import StartRefused

PAGES = 2_000  # copied at a time


def copy(database: Path, target: Path, progress: Progress) -> None:
    """Copy the database consistently as of now, including the write-ahead log, while others keep writing."""
    if not database.exists():
        raise StartRefused(f"no such database: {database}: set VIGIL_HOME to the portal's, or start it once.")
    require_space(database.stat().st_size, target.parent)
    with closing(_open(database)) as source, closing(sqlite3.connect(target)) as copied:
        os.chmod(target, 0o600)
        size = source.execute("PRAGMA page_size").fetchone()[0]
        # One read transaction around the whole copy: otherwise every write by another process would restart it.
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
    """Return the applied migrations, by app."""
    with closing(_open(database)) as connection:
        return by_app(connection.execute("SELECT app, name FROM django_migrations ORDER BY id").fetchall())


def by_app(rows: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for app, name in rows:
        found.setdefault(app, []).append(name)
    return found


def _open(database: Path) -> sqlite3.Connection:
    """Open an existing database; never create one."""
    return sqlite3.connect(f"file:{quote(str(database))}?mode=rw", uri=True, timeout=20, isolation_level=None)


def put_in_place(staged: Path, database: Path, stamp: str) -> Path | None:
    """Replace the database by the staged one; return the path at which the old one was set aside, if there was one.

    Until the last rename the old database is in place and complete, after it the new one. No other process may have it
    open.
    """
    aside = database.with_name(f"{database.name}.before-{stamp}")
    was_there = database.exists()
    if was_there:
        fold_log(database)
        os.link(database, aside)
    # Log files left by a broken or removed database would be replayed into the new one.
    for end in ("-wal", "-shm", "-journal"):
        log = database.with_name(database.name + end)
        if log.exists():
            os.replace(log, aside.with_name(aside.name + end))
    files.sync(database.parent)
    os.replace(staged, database)
    files.sync(database.parent)
    return aside if was_there else None


def fold_log(database: Path) -> None:
    """Merge the write-ahead log into the database, so that a single file holds everything."""
    try:
        with closing(_open(database)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE").fetchone()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            raise StartRefused(f"another program has {database} open: stop it first.") from None
        # The database is broken: leave it as it is.


def staging_path(staged: Path, database: Path) -> Path:
    """Return a path on the database's own file system, from where a rename can put the copy in place."""
    target = database.with_name(f"{database.name}.restoring")
    target.unlink(missing_ok=True)
    with closing(_open(staged)) as source, closing(sqlite3.connect(target)) as copied:
        os.chmod(target, 0o600)
        source.backup(copied)
    return target
