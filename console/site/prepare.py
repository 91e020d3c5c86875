"""What a start needs before the first request: the database's schema, static files, the first sysadmin."""

from __future__ import annotations

from hashlib import sha256

from django.conf import settings
from django.contrib.staticfiles.finders import get_finders
from django.core.checks import ERROR, run_checks
from django.core.management import call_command
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from console.site import checks, job_code, this_machine
from jobs.listing import keeping
from portal.accounts import actions
from portal.http.staticfiles import UNUSED
from portal.run.preflight import Refused

# Any number that nothing else locks: two starts on one PostgreSQL take turns.
LOCK = 7_424_101


def prepare(mark: str = "") -> list[str]:
    """Bring the site up to date and answer what a person should read: notes, the first sysadmin's link.

    `mark` is left in VIGIL_HOME/prepared once everything is done. Raises Refused at what would misbehave later.
    """
    said = _check()
    _migrate()
    _collect_static()
    job_code.link()
    if url := actions.first_start():
        said.append(f"Sign in: {url}")
    if mark:
        this_machine.enrol()
        (settings.VIGIL_HOME / "prepared").write_text(mark)
    return said


def _check() -> list[str]:
    """Stop at what would misbehave, mention what only might."""
    notes = []
    for found in run_checks(tags=[checks.TAG]):
        text = " ".join(part for part in (str(found.msg), found.hint) if part)
        if found.level >= ERROR:
            raise Refused(text)
        notes.append(f"Note: {text}")
    return notes


def _migrate() -> None:
    """Apply what is missing; looking first is quicker than `migrate`, which always visits every content type."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_advisory_lock(%s)", [LOCK])
        try:
            executor = MigrationExecutor(connection)
            is_behind = bool(executor.migration_plan(executor.loader.graph.leaf_nodes()))
            # A start that was killed after its last migration has yet to put the listing's triggers back.
            if is_behind or not keeping.is_kept(connection):
                call_command("migrate", interactive=False, verbosity=0)
        finally:
            if connection.vendor == "postgresql":
                cursor.execute("SELECT pg_advisory_unlock(%s)", [LOCK])


def _collect_static() -> None:
    """Collect, hash and compress again only when a source file changed."""
    stamp = settings.STATIC_ROOT / ".sources"
    sources = _sources()
    if stamp.exists() and stamp.read_text() == sources:
        return
    call_command("collectstatic", interactive=False, verbosity=0, ignore_patterns=UNUSED)
    stamp.write_text(sources)


def _sources() -> str:
    """A digest of every source file's name, size and time."""
    lines = []
    for finder in get_finders():
        for path, storage in finder.list([]):
            modified = storage.get_modified_time(path).timestamp()
            lines.append(f"{path} {storage.size(path)} {modified}")
    return sha256("\n".join(sorted(lines)).encode()).hexdigest()
