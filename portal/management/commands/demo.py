"""A made-up lab to look around in."""

from django.core.management.base import BaseCommand

from portal.demo import lab


class Command(BaseCommand):
    help = "Add a believable lab: people, projects, jobs that ended well and badly, and one that runs."
    requires_system_checks = ()

    def handle(self, *args: object, **options: object) -> None:
        made = lab.make()
        self.stdout.write(f"Made {len(made)} jobs." if made else "The demonstration lab is there already.")
