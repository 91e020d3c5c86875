"""Apply missing migrations: when a site is prepared, and when a process starts with newer code than the database.

The second happens if files are replaced under a running portal: its supervisor then restarts single processes, which
run the new code, long before anybody restarts the whole.
"""

from __future__ import annotations

import fcntl
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.apps import apps
from django.conf import settings
from django.db import DatabaseError, connection

from jobs.listing import triggers

# Any number that nothing else locks: it serialises two starts on one PostgreSQL.
LOCK = 7_424_101
OURS = ("portal", "nodes", "jobs")
"""The applications whose migrations come with Vigil's own files."""
log = logging.getLogger(__name__)


def migrate() -> None:
    """Apply missing migrations. Checking first is quicker than `migrate`, which always visits every content type."""
    # Imported here, as every process imports this module when it starts, and hardly any migrates.
    from django.core.management import call_command
    from django.db.migrations.executor import MigrationExecutor

    with _lock():
        executor = MigrationExecutor(connection)
        is_behind = bool(executor.migration_plan(executor.loader.graph.leaf_nodes()))
        # If a start was killed after its last migration, the listing's triggers are still missing.
        if is_behind or not triggers.has_triggers(connection):
            with _rare_garbage_collection():
                call_command("migrate", interactive=False, verbosity=0)


def migrate_older_database() -> None:
    """Apply missing migrations if the database was prepared by older code, and leave one that never was.

    Comparing names of files takes a millisecond, so every process can afford it when it starts.
    """
    try:
        if missing := _missing():
            log.warning("the database is older than this code: applying %d migrations", len(missing))
            migrate()
    except DatabaseError as error:  # it is away, or belongs to another role: the process says so wherever it needs it
        log.warning("could not bring the database up to date: %s", error)
    finally:
        connection.close()


def _missing() -> set[str]:
    """Return the migrations in Vigil's files that the database does not record, as `app.name`."""
    if "django_migrations" not in connection.introspection.table_names():
        return set()
    with connection.cursor() as cursor:
        cursor.execute("SELECT app, name FROM django_migrations")
        recorded = {f"{app}.{name}" for app, name in cursor.fetchall()}
    folders = {app: Path(apps.get_app_config(app).path) / "migrations" for app in OURS}
    return {f"{app}.{path.stem}" for app, folder in folders.items() for path in folder.glob("0*.py")} - recorded


@contextmanager
def _lock() -> Iterator[None]:
    """Let one process at a time migrate."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s)", [LOCK])
            try:
                yield
            finally:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [LOCK])
        return
    with (settings.VIGIL_HOME / "migrations.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Collect garbage rarely: migrations render thousands of models, and collecting took a fifth of the CPU time.

    Measured for a first start on SQLite: 7.5 s instead of 9.2 s, with 164 MB of memory instead of 117.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
