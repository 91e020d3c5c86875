"""`manage.py known_migrations`: every migration that this code has, as JSON by app; asks no database."""

import json

from django.core.management.base import BaseCommand
from django.db.migrations.loader import MigrationLoader


class Command(BaseCommand):
    help = "Print the migrations that this code knows."
    requires_system_checks = ()

    def handle(self, *args: object, **options: object) -> None:
        known: dict[str, list[str]] = {}
        for app, name in sorted(MigrationLoader(None).disk_migrations or ()):
            known.setdefault(app, []).append(name)
        self.stdout.write(json.dumps(known))
