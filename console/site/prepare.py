"""Prepare a start: migrate the database, collect static files, create the first sysadmin."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

from django.conf import settings
from django.contrib.staticfiles.finders import get_finders
from django.core.checks import ERROR, run_checks
from django.core.management import call_command
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from console.site import checks, job_code, this_machine
from jobs.listing import triggers
from portal.accounts import actions
from portal.http.staticfiles import UNUSED
from portal.run.preflight import StartRefused

# Any number that nothing else locks: it serialises two starts on one PostgreSQL.
LOCK = 7_424_101


def prepare(mark: str = "") -> list[str]:
    """Bring the site up to date and return what a person should read: notes, and the first sysadmin's link.

    `mark` is written to VIGIL_HOME/prepared once everything is done. Raises StartRefused if the
    site would misbehave later.
    """
    notes = _check()
    _migrate()
    _collect_static()
    job_code.link()
    if url := actions.first_start():
        notes.append(f"Sign in: {url}")
    if mark:
        this_machine.enrol()
        (settings.VIGIL_HOME / "prepared").write_text(mark)
    return notes


def _check() -> list[str]:
    """Run the checks: raise StartRefused at the first error, return the warnings."""
    notes = []
    for found in run_checks(tags=[checks.TAG]):
        text = " ".join(part for part in (str(found.msg), found.hint) if part)
        if found.level >= ERROR:
            raise StartRefused(text)
        notes.append(f"Note: {text}")
    return notes


def _migrate() -> None:
    """Apply missing migrations. Checking first is quicker than `migrate`, which always visits every content type."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_advisory_lock(%s)", [LOCK])
        try:
            executor = MigrationExecutor(connection)
            is_behind = bool(executor.migration_plan(executor.loader.graph.leaf_nodes()))
            # If a start was killed after its last migration, the listing's triggers are still missing.
            if is_behind or not triggers.has_triggers(connection):
                with _rare_garbage_collection():
                    call_command("migrate", interactive=False, verbosity=0)
        finally:
            if connection.vendor == "postgresql":
                cursor.execute("SELECT pg_advisory_unlock(%s)", [LOCK])


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


def _collect_static() -> None:
    """Collect, hash and compress again only when a source file changed."""
    stamp = settings.STATIC_ROOT / ".sources"
    sources = _sources()
    if stamp.exists() and stamp.read_text() == sources:
        return
    call_command("collectstatic", interactive=False, verbosity=0, ignore_patterns=UNUSED)
    stamp.write_text(sources)


def _sources() -> str:
    """Return a digest of every source file's name, size and time."""
    lines = []
    for finder in get_finders():
        for path, storage in finder.list([]):
            modified = storage.get_modified_time(path).timestamp()
            lines.append(f"{path} {storage.size(path)} {modified}")
    return sha256("\n".join(sorted(lines)).encode()).hexdigest()
