"""Keep the listing in sync by database triggers, and index names by the database's own search (FTS5, pg_trgm).

They are part of no migration: SQLite drops the triggers of a table that a migration rebuilds, and cannot even rebuild
it while other triggers name it. So they are dropped before this app's migrations and created again after them, together
with any rows missed meanwhile.
"""

from __future__ import annotations

import logging
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, ProgrammingError

from jobs.listing import postgres, sqlite

logger = logging.getLogger(__name__)

TABLE = "jobs_listing"
NO_TRIGRAMS = (
    "Names are searched without an index, because the PostgreSQL extension pg_trgm could not be created: "
    "as a superuser, run CREATE EXTENSION pg_trgm; in Vigil's database, then `python manage.py migrate`."
)
_COLUMNS = "id, attempt_id, project_id, owner_id, kind, name, state, created_at, started_at, ended_at"
_LINES = """
    SELECT j.id, j.latest_id, j.project_id, j.owner_id, j.kind, j.name, COALESCE(a.state, ''), j.created_at,
           COALESCE(a.started_at, '1970-01-01 00:00:00{utc}'), COALESCE(a.ended_at, '1970-01-01 00:00:00{utc}')
    FROM jobs_job j LEFT JOIN jobs_attempt a ON a.id = j.latest_id"""
_DELETE_STALE = """
    DELETE FROM jobs_listing WHERE NOT EXISTS (
        SELECT 1 FROM jobs_job j LEFT JOIN jobs_attempt a ON a.id = j.latest_id
        WHERE j.id = jobs_listing.id AND COALESCE(j.latest_id, 0) = COALESCE(jobs_listing.attempt_id, 0)
        AND j.project_id = jobs_listing.project_id AND j.owner_id = jobs_listing.owner_id
        AND j.kind = jobs_listing.kind AND j.name = jobs_listing.name AND j.created_at = jobs_listing.created_at
        AND COALESCE(a.state, '') = jobs_listing.state
        AND COALESCE(a.started_at, '1970-01-01 00:00:00{utc}') = jobs_listing.started_at
        AND COALESCE(a.ended_at, '1970-01-01 00:00:00{utc}') = jobs_listing.ended_at)"""
_FILL = f"""
    INSERT INTO jobs_listing ({_COLUMNS}) {_LINES}
    WHERE NOT EXISTS (SELECT 1 FROM jobs_listing l WHERE l.id = j.id)"""


def before_migrations(*, using: str, plan: list[tuple[Any, bool]], **about: object) -> None:
    """Drop the triggers if migrations of this app are about to run."""
    if any(migration.app_label == "jobs" for migration, _ in plan):
        drop_triggers(connections[using])


def after_migrations(*, using: str, **about: object) -> None:
    """Create missing triggers, and add the rows missed without them."""
    connection = connections[using]
    if has_triggers(connection) or TABLE not in connection.introspection.table_names():
        return
    create_triggers(connection)


def has_triggers(connection: BaseDatabaseWrapper) -> bool:
    """Return whether every trigger exists."""
    with connection.cursor() as cursor:
        cursor.execute(_vendor(connection).EXISTING_TRIGGERS)
        wanted: set[str] = _vendor(connection).TRIGGERS
        return wanted <= {name for (name,) in cursor.fetchall()}


def drop_triggers(connection: BaseDatabaseWrapper) -> None:
    """Drop the triggers; the listing stays unchanged until `create_triggers`."""
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        _vendor(connection).drop_triggers(cursor)


def create_triggers(connection: BaseDatabaseWrapper) -> None:
    """Bring the listing up to date and create the triggers, all in one transaction."""
    vendor = _vendor(connection)
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        vendor.drop_triggers(cursor)
        vendor.lock_tables(cursor)
        rebuild(connection)
        try:
            with transaction.atomic(using=connection.alias):
                vendor.index_names(cursor)
        except (ProgrammingError, DatabaseError) as error:
            logger.warning("%s (%s)", NO_TRIGRAMS, str(error).splitlines()[0])
        for statement in vendor.CREATE_TRIGGERS:
            cursor.execute(statement)


def rebuild(connection: BaseDatabaseWrapper) -> None:
    """Write rows that are missing or wrong, and delete those without a job."""
    utc = _vendor(connection).UTC
    with connection.cursor() as cursor:
        cursor.execute(_DELETE_STALE.format(utc=utc))
        cursor.execute(_FILL.format(utc=utc))


def _vendor(connection: BaseDatabaseWrapper) -> Any:
    return postgres if connection.vendor == "postgresql" else sqlite
