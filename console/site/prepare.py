"""Prepare a start: migrate the database, collect static files, create the first sysadmin."""

from __future__ import annotations

from hashlib import sha256

from django.conf import settings
from django.contrib.staticfiles.finders import get_finders
from django.core.checks import ERROR, run_checks
from django.core.management import call_command

from console.site import checks, job_code, migrations, this_machine
from portal.accounts import actions
from portal.http.staticfiles import UNUSED
from portal.run.preflight import StartRefused


def prepare(mark: str = "") -> list[str]:
    """Bring the site up to date and return what a person should read: notes, and the first sysadmin's link.

    `mark` is written to VIGIL_HOME/prepared once everything is done. Raises StartRefused if the
    site would misbehave later.
    """
    notes = _check()
    migrations.migrate()
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
