"""What a start needs before the first request: the database's schema, static files, the first sysadmin."""

from argparse import ArgumentParser
from hashlib import sha256

from django.conf import settings
from django.contrib.staticfiles.finders import get_finders
from django.core.checks import ERROR, run_checks
from django.core.management import call_command, get_commands
from django.core.management.base import BaseCommand, CommandError
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from portal import checks

# Any number that nothing else locks: two starts on one PostgreSQL take turns.
LOCK = 7_424_101


class Command(BaseCommand):
    help = "Bring the database and the static files up to date; make the first sysadmin."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--mark", default="", help="left in VIGIL_HOME/prepared once everything is done")

    def handle(self, *args: object, mark: str, **options: object) -> None:
        self.check_site()
        migrate()
        collect_static()
        if "first_start" in get_commands():
            call_command("first_start", stdout=self.stdout)
        if mark:
            (settings.VIGIL_HOME / "prepared").write_text(mark)

    def check_site(self) -> None:
        """Stop at what would misbehave later, mention what only might."""
        for found in run_checks(tags=[checks.TAG]):
            text = " ".join(part for part in (str(found.msg), found.hint) if part)
            if found.level >= ERROR:
                raise CommandError(text)
            self.stdout.write(f"Note: {text}")


def migrate() -> None:
    """Apply what is missing; looking first is quicker than `migrate`, which always visits every content type."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_advisory_lock(%s)", [LOCK])
        try:
            executor = MigrationExecutor(connection)
            if executor.migration_plan(executor.loader.graph.leaf_nodes()):
                call_command("migrate", interactive=False, verbosity=0)
        finally:
            if connection.vendor == "postgresql":
                cursor.execute("SELECT pg_advisory_unlock(%s)", [LOCK])


def collect_static() -> None:
    """Collect, hash and compress again only when a source file changed."""
    stamp = settings.STATIC_ROOT / ".sources"
    sources = _sources()
    if stamp.exists() and stamp.read_text() == sources:
        return
    call_command("collectstatic", interactive=False, verbosity=0)
    stamp.write_text(sources)


def _sources() -> str:
    """A digest of every source file's name, size and time."""
    lines = []
    for finder in get_finders():
        for path, storage in finder.list([]):
            modified = storage.get_modified_time(path).timestamp()
            lines.append(f"{path} {storage.size(path)} {modified}")
    return sha256("\n".join(sorted(lines)).encode()).hexdigest()
