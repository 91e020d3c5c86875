"""SQLite's part of the listing: triggers, FTS5's trigrams, and how the join order is fixed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

UTC = ""  # times are stored as text without a zone
LIKE = r"LIKE %s ESCAPE '\'"
MATCHING_NAMES = "SELECT rowid AS id FROM jobs_listing_names WHERE jobs_listing_names MATCH %s"
# Ids as a single value, unless there are too many, and the SQL that returns them, each once.
AGGREGATED_IDS = "count(*), CASE WHEN count(*) <= {most} THEN json_group_array(id) END"
UNPACKED_IDS = "SELECT DISTINCT value AS id FROM json_each(%s)"
JOIN = "CROSS JOIN jobs_listing l ON l.id = d.id"  # SQLite keeps the order of a cross join
EXISTING_TRIGGERS = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
_EPOCH = "'1970-01-01 00:00:00'"
_STATE = f"""
    attempt_id = NEW.latest_id,
    state = COALESCE((SELECT state FROM jobs_attempt WHERE id = NEW.latest_id), ''),
    started_at = COALESCE((SELECT started_at FROM jobs_attempt WHERE id = NEW.latest_id), {_EPOCH}),
    ended_at = COALESCE((SELECT ended_at FROM jobs_attempt WHERE id = NEW.latest_id), {_EPOCH})"""
_TRIGGERS = {
    "listing_added": f"""AFTER INSERT ON jobs_job BEGIN
        INSERT INTO jobs_listing (id, project_id, owner_id, kind, name, state, created_at, started_at, ended_at)
        VALUES (NEW.id, NEW.project_id, NEW.owner_id, NEW.kind, NEW.name, '', NEW.created_at, {_EPOCH}, {_EPOCH});
        UPDATE jobs_listing SET {_STATE} WHERE id = NEW.id AND NEW.latest_id IS NOT NULL; END""",
    "listing_changed": """AFTER UPDATE OF project_id, owner_id, kind, name, created_at ON jobs_job
        WHEN (NEW.project_id, NEW.owner_id, NEW.kind, NEW.name, NEW.created_at)
            IS NOT (OLD.project_id, OLD.owner_id, OLD.kind, OLD.name, OLD.created_at) BEGIN
        UPDATE jobs_listing SET project_id = NEW.project_id, owner_id = NEW.owner_id, kind = NEW.kind,
            name = NEW.name, created_at = NEW.created_at WHERE id = NEW.id; END""",
    "listing_followed": f"""AFTER UPDATE OF latest_id ON jobs_job WHEN NEW.latest_id IS NOT OLD.latest_id BEGIN
        UPDATE jobs_listing SET {_STATE} WHERE id = NEW.id; END""",
    "listing_removed": """AFTER DELETE ON jobs_job BEGIN DELETE FROM jobs_listing WHERE id = OLD.id; END""",
    "listing_moved": f"""AFTER UPDATE OF state, started_at, ended_at ON jobs_attempt
        WHEN (NEW.state, NEW.started_at, NEW.ended_at) IS NOT (OLD.state, OLD.started_at, OLD.ended_at) BEGIN
        UPDATE jobs_listing SET state = NEW.state, started_at = COALESCE(NEW.started_at, {_EPOCH}),
            ended_at = COALESCE(NEW.ended_at, {_EPOCH}) WHERE id = NEW.job_id AND attempt_id = NEW.id; END""",
    "listing_name_added": """AFTER INSERT ON jobs_listing BEGIN
        INSERT INTO jobs_listing_names(rowid, name) VALUES (NEW.id, NEW.name); END""",
    "listing_name_changed": """AFTER UPDATE OF name ON jobs_listing WHEN NEW.name <> OLD.name BEGIN
        INSERT INTO jobs_listing_names(jobs_listing_names, rowid, name) VALUES ('delete', OLD.id, OLD.name);
        INSERT INTO jobs_listing_names(rowid, name) VALUES (NEW.id, NEW.name); END""",
    "listing_name_removed": """AFTER DELETE ON jobs_listing BEGIN
        INSERT INTO jobs_listing_names(jobs_listing_names, rowid, name) VALUES ('delete', OLD.id, OLD.name); END""",
}
TRIGGERS = set(_TRIGGERS)
CREATE_TRIGGERS = [f"CREATE TRIGGER {name} {what}" for name, what in _TRIGGERS.items()]


def drop_triggers(cursor: Any) -> None:
    for name in _TRIGGERS:
        cursor.execute(f"DROP TRIGGER IF EXISTS {name}")


def lock_tables(cursor: Any) -> None:
    """Do nothing: SQLite has a single writer, and this is it."""


def index_names(cursor: Any) -> None:
    """Create a trigram index of names. It stores no names, as the listing has them."""
    cursor.execute("DROP TABLE IF EXISTS jobs_listing_names")
    cursor.execute(
        "CREATE VIRTUAL TABLE jobs_listing_names USING fts5(name, content='jobs_listing', content_rowid='id',"
        " tokenize='trigram', columnsize=0)"
    )
    cursor.execute("INSERT INTO jobs_listing_names(jobs_listing_names) VALUES ('rebuild')")


def name_pattern(word: str) -> str:
    """Return the pattern for `MATCHING_NAMES`: the word as one phrase of trigrams."""
    return '"' + word.replace('"', '""') + '"'


@contextmanager
def by_index(cursor: Any, *, bitmaps: bool = False) -> Iterator[None]:
    """Do nothing: SQLite uses an index wherever one gives the requested order."""
    yield
