"""Print every migration that this code has as JSON by app, without a database."""

import json

from django.core.management.base import BaseCommand
from django.db.migrations.loader import MigrationLoader


class Command(BaseCommand):
    help = "Print the migrations in this code."
    requires_system_checks = ()

    def handle(self, *args: object, **options: object) -> None:
        migrations: dict[str, list[str]] = {}
        for app, name in sorted(MigrationLoader(None).disk_migrations or ()):
            migrations.setdefault(app, []).append(name)
        self.stdout.write(json.dumps(migrations))
