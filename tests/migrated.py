"""The tests' database, migrated once for all workers of a run: each takes a copy, for to migrate takes seconds."""

from __future__ import annotations

import fcntl
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db.backends.sqlite3.creation import DatabaseCreation


def share(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The first worker that comes keeps its database in `folder`, where the others find it."""
    kept, migrate = folder / "migrated.sqlite3", DatabaseCreation.create_test_db

    def create(creation: DatabaseCreation, *arguments: Any, **options: Any) -> str:
        with (folder / "migrated.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                name = migrate(creation, *arguments, **options)
                with closing(sqlite3.connect(kept)) as copy:
                    creation.connection.connection.backup(copy)
                return name
        return _copy(creation, kept)

    patch.setattr(DatabaseCreation, "create_test_db", create)


def _copy(creation: DatabaseCreation, kept: Path) -> str:
    """What Django's own does, without migrating."""
    connection: Any = creation.connection
    name = str(creation._get_test_db_name())  # type: ignore[attr-defined]
    connection.close()
    settings.DATABASES[connection.alias]["NAME"] = connection.settings_dict["NAME"] = name
    connection.ensure_connection()
    with closing(sqlite3.connect(kept)) as source:
        source.backup(connection.connection)
    return name
