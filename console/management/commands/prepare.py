"""Prepare the site before web and workers start, once per container start; under `vigil up` web does this."""

from django.core.management.base import BaseCommand, CommandError

from console.site.prepare import prepare
from portal.run.preflight import StartRefused


class Command(BaseCommand):
    help = "Bring the database and the static files up to date; create the first sysadmin."
    requires_system_checks = ()

    def handle(self, *args: object, **options: object) -> None:
        try:
            for line in prepare():
                self.stdout.write(line)
        except StartRefused as error:
            raise CommandError(str(error)) from None
