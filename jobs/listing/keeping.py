"""What keeps the listing in step: triggers, and the database's own search in names (FTS5, pg_trgm).

They are part of no migration: SQLite forgets the triggers of a table that a migration makes anew, and cannot even do so
while others name it. So they go before this app's migrations and come back after them, with what was missed meanwhile.
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
    "Names are searched without an index, for the PostgreSQL extension pg_trgm cannot be created: "
    "let a superuser say CREATE EXTENSION pg_trgm; in Vigil's database, then run `python manage.py migrate`."
)
_COLUMNS = "id, attempt_id, project_id, owner_id, kind, name, state, created_at, started_at, ended_at"
_LINES = """
    SELECT j.id, j.latest_id, j.project_id, j.owner_id, j.kind, j.name, COALESCE(a.state, ''), j.created_at,
           COALESCE(a.started_at, '1970-01-01 00:00:00{utc}'), COALESCE(a.ended_at, '1970-01-01 00:00:00{utc}')
    FROM jobs_job j LEFT JOIN jobs_attempt a ON a.id = j.latest_id"""
_FORGET = """
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
    """Let go of the tables that are about to change. With nothing to apply, nothing goes."""
    if any(migration.app_label == "jobs" for migration, _ in plan):
        let_go(connections[using])


def after_migrations(*, using: str, **about: object) -> None:
    """Put back what is missing, and with it the lines that were."""
    connection = connections[using]
    if is_kept(connection) or TABLE not in connection.introspection.table_names():
        return
    keep(connection)


def is_kept(connection: BaseDatabaseWrapper) -> bool:
    """Whether every trigger is there."""
    with connection.cursor() as cursor:
        cursor.execute(_vendor(connection).THERE)
        wanted: set[str] = _vendor(connection).TRIGGERS
        return wanted <= {name for (name,) in cursor.fetchall()}


def let_go(connection: BaseDatabaseWrapper) -> None:
    """Remove what keeps the listing: until `keep`, it stays as it is."""
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        _vendor(connection).let_go(cursor)


def keep(connection: BaseDatabaseWrapper) -> None:
    """Bring the listing in step with what there is, and set up what keeps it so: all of it, or nothing."""
    vendor = _vendor(connection)
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        vendor.let_go(cursor)
        vendor.shut(cursor)
        bring_in_step(connection)
        try:
            with transaction.atomic(using=connection.alias):
                vendor.index_names(cursor)
        except (ProgrammingError, DatabaseError) as error:
            logger.warning("%s (%s)", NO_TRIGRAMS, str(error).splitlines()[0])
        for statement in vendor.KEEP:
            cursor.execute(statement)


def bring_in_step(connection: BaseDatabaseWrapper) -> None:
    """Write the lines that are missing or wrong, remove those of no job."""
    utc = _vendor(connection).UTC
    with connection.cursor() as cursor:
        cursor.execute(_FORGET.format(utc=utc))
        cursor.execute(_FILL.format(utc=utc))


def _vendor(connection: BaseDatabaseWrapper) -> Any:
    return postgres if connection.vendor == "postgresql" else sqlite
