"""`manage.py first_start`: the first sysadmin, their link and the CLI's token, if they are missing."""

from django.core.management.base import BaseCommand

from portal import accounts


class Command(BaseCommand):
    help = "Make the first sysadmin, the default project and cli.toml, and print the sign-in link until it was used."

    def handle(self, *args: object, **options: object) -> None:
        if url := accounts.first_start():
            self.stdout.write(f"Sign in: {url}")
