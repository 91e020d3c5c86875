"""Migrate the tests' database once per run; other workers copy it, as migrating takes ten CPU seconds.

On PostgreSQL a test database is dropped even if a session still uses it.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db.backends.base.creation import BaseDatabaseCreation
from django.db.backends.sqlite3.creation import DatabaseCreation

TEMPLATE = "migrated_template"


def share(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the first worker migrate and leave a copy in `folder` (or on its server) for the other workers."""
    if os.environ.get("TEST_DATABASE") == "postgres":
        _share_postgres(folder, patch)
    else:
        _share_sqlite(folder, patch)


def _share_sqlite(folder: Path, patch: pytest.MonkeyPatch) -> None:
    copy_path, migrate = folder / "migrated.sqlite3", DatabaseCreation.create_test_db

    def create(creation: DatabaseCreation, *arguments: Any, **options: Any) -> str:
        with _locked(folder):
            if not copy_path.exists():
                name = migrate(creation, *arguments, **options)
                with closing(sqlite3.connect(copy_path)) as copy:
                    creation.connection.connection.backup(copy)
                return name
        return _copy(creation, copy_path)

    patch.setattr(DatabaseCreation, "create_test_db", create)


def _share_postgres(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Share by a template database, which disappears with the private cluster that the run starts and removes."""
    done, migrate = folder / "migrated.postgres", BaseDatabaseCreation.create_test_db

    def create(creation: BaseDatabaseCreation, *arguments: Any, **options: Any) -> str:
        connection: Any = creation.connection
        with _locked(folder):
            if done.exists():
                connection.settings_dict["TEST"]["TEMPLATE"] = TEMPLATE
                return migrate(creation, *arguments, **options)  # finds nothing to apply
            name = migrate(creation, *arguments, **options)
            connection.close()  # a database in use cannot be copied
            with creation._nodb_cursor() as cursor:  # type: ignore[attr-defined]
                cursor.execute(f'DROP DATABASE IF EXISTS "{TEMPLATE}"')
                cursor.execute(f'CREATE DATABASE "{TEMPLATE}" TEMPLATE "{name}"')
            done.touch()
            return name

    patch.setattr(BaseDatabaseCreation, "create_test_db", create)


def drop_with_sessions(patch: pytest.MonkeyPatch) -> None:
    """Let PostgreSQL end sessions that are left when a test database is dropped.

    A connection that a thread opened is closed when the garbage collector finds it after the thread's end, or when the
    server notices; until then DROP DATABASE fails. The tests are over by then, and the server is private to the run.
    """

    def drop(creation: BaseDatabaseCreation, name: str, verbosity: int) -> None:
        with creation._nodb_cursor() as cursor:  # type: ignore[attr-defined]
            cursor.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    patch.setattr(BaseDatabaseCreation, "_destroy_test_db", drop)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "migrated.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _copy(creation: DatabaseCreation, copy_path: Path) -> str:
    """Replace Django's own setup: copy a database instead of migrating."""
    connection: Any = creation.connection
    name = str(creation._get_test_db_name())  # type: ignore[attr-defined]
    connection.close()
    settings.DATABASES[connection.alias]["NAME"] = connection.settings_dict["NAME"] = name
    connection.ensure_connection()
    with closing(sqlite3.connect(copy_path)) as source:
        source.backup(connection.connection)
    return name
