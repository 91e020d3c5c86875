"""PostgreSQL's part of the listing: triggers, pg_trgm, and how statements are made to use indexes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import transaction

UTC = "+00"
LIKE = "ILIKE %s"
MATCHING_NAMES = "SELECT id FROM jobs_listing WHERE name ILIKE %s"
# Ids as a single value, unless there are too many, and the SQL that returns them, each once.
AGGREGATED_IDS = "count(*), CASE WHEN count(*) <= {most} THEN COALESCE(array_agg(id)::text, '{{}}') END"
UNPACKED_IDS = "SELECT DISTINCT unnest(%s::bigint[]) AS id"
# Opaque to the planner: it looks up each of the few rows instead of scanning the many.
JOIN = "CROSS JOIN LATERAL (SELECT * FROM jobs_listing x WHERE x.id = d.id LIMIT 1) l"
EXISTING_TRIGGERS = (
    "SELECT tgname FROM pg_trigger WHERE tgrelid IN (to_regclass('jobs_job'), to_regclass('jobs_attempt'))"
)
_EPOCH = "'1970-01-01 00:00:00+00'"
_FUNCTIONS = {
    "listing_of_job": f"""BEGIN
        IF TG_OP = 'DELETE' THEN DELETE FROM jobs_listing WHERE id = OLD.id; RETURN NULL; END IF;
        IF TG_OP = 'INSERT' THEN
            INSERT INTO jobs_listing (id, project_id, owner_id, kind, name, state, created_at, started_at, ended_at)
            VALUES (NEW.id, NEW.project_id, NEW.owner_id, NEW.kind, NEW.name, '', NEW.created_at, {_EPOCH}, {_EPOCH});
        ELSIF (NEW.project_id, NEW.owner_id, NEW.kind, NEW.name, NEW.created_at)
            IS DISTINCT FROM (OLD.project_id, OLD.owner_id, OLD.kind, OLD.name, OLD.created_at) THEN
            UPDATE jobs_listing SET project_id = NEW.project_id, owner_id = NEW.owner_id, kind = NEW.kind,
                name = NEW.name, created_at = NEW.created_at WHERE id = NEW.id;
        END IF;
        IF TG_OP = 'INSERT' AND NEW.latest_id IS NOT NULL
            OR TG_OP = 'UPDATE' AND NEW.latest_id IS DISTINCT FROM OLD.latest_id THEN
            UPDATE jobs_listing l SET attempt_id = NEW.latest_id, state = COALESCE(a.state, ''),
                started_at = COALESCE(a.started_at, {_EPOCH}), ended_at = COALESCE(a.ended_at, {_EPOCH})
            FROM (SELECT 1) one LEFT JOIN jobs_attempt a ON a.id = NEW.latest_id WHERE l.id = NEW.id;
        END IF;
        RETURN NULL; END""",
    "listing_of_attempt": f"""BEGIN
        UPDATE jobs_listing SET state = NEW.state, started_at = COALESCE(NEW.started_at, {_EPOCH}),
            ended_at = COALESCE(NEW.ended_at, {_EPOCH}) WHERE id = NEW.job_id AND attempt_id = NEW.id;
        RETURN NULL; END""",
}
_TRIGGERS = {
    "listing_of_job": "AFTER INSERT OR DELETE OR UPDATE OF project_id, owner_id, kind, name, created_at, latest_id"
    " ON jobs_job FOR EACH ROW EXECUTE FUNCTION listing_of_job()",
    "listing_of_attempt": "AFTER UPDATE OF state, started_at, ended_at ON jobs_attempt FOR EACH ROW"
    " WHEN ((NEW.state, NEW.started_at, NEW.ended_at) IS DISTINCT FROM (OLD.state, OLD.started_at, OLD.ended_at))"
    " EXECUTE FUNCTION listing_of_attempt()",
}
TRIGGERS = set(_TRIGGERS)
CREATE_TRIGGERS = [
    *(
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ {what} $$"
        for name, what in _FUNCTIONS.items()
    ),
    *(f"CREATE TRIGGER {name} {what}" for name, what in _TRIGGERS.items()),
]


def drop_triggers(cursor: Any) -> None:
    for name in _FUNCTIONS:
        cursor.execute(f"DROP FUNCTION IF EXISTS {name}() CASCADE")  # and its trigger


def lock_tables(cursor: Any) -> None:
    """Lock the tables, so that concurrent writes wait until the triggers exist."""
    cursor.execute("LOCK TABLE jobs_job, jobs_attempt, jobs_listing IN SHARE ROW EXCLUSIVE MODE")


def index_names(cursor: Any) -> None:
    """Create the index on names.

    The extension is trusted since PostgreSQL 13: creating tables suffices as a privilege.
    """
    cursor.execute("CREATE EXTENSION IF NOT EXISTS pg_trgm")
    cursor.execute("CREATE INDEX IF NOT EXISTS listing_names ON jobs_listing USING gin (name gin_trgm_ops)")


def name_pattern(word: str) -> str:
    """Return the pattern for `MATCHING_NAMES`: the word anywhere in a name."""
    escaped = word.replace("\\", "\\\\").replace("%", r"\%").replace("_", r"\_")
    return f"%{escaped}%"


@contextmanager
def by_index(cursor: Any, *, bitmaps: bool = False) -> Iterator[None]:
    """Make statements in this block use indexes, whatever the planner's statistics say: they may be old or missing.

    Each statement has a LIMIT, so a scan ends early, which the planner's estimates do not know.
    """
    off = ["enable_seqscan", "enable_hashjoin", "enable_mergejoin", "jit", *([] if bitmaps else ["enable_bitmapscan"])]
    is_part = cursor.db.in_atomic_block
    with transaction.atomic():
        cursor.execute("SELECT " + ", ".join(f"set_config('{name}', 'off', true)" for name in off))
        yield
        if is_part:  # otherwise they end with the transaction; after an error, with the rollback
            cursor.execute("SELECT " + ", ".join(f"set_config('{name}', 'on', true)" for name in off))
