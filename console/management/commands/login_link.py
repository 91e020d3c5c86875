"""Create another one-time sign-in link: `manage.py login_link [USER]`."""

from argparse import ArgumentParser

from django.core.management.base import BaseCommand, CommandError
from django.db import OperationalError, ProgrammingError

from portal.access import note
from portal.accounts import actions
from portal.models import User


class Command(BaseCommand):
    help = "Print a one-time sign-in link, valid for an hour; without a name, for the first sysadmin."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("username", nargs="?")

    def handle(self, *args: object, username: str | None = None, **options: object) -> None:
        people = User.objects.filter(is_active=True)
        found = people.filter(username=username) if username else people.filter(is_superuser=True).order_by("pk")
        try:
            user = found.first()
        except (OperationalError, ProgrammingError):
            raise CommandError("Vigil has not been started here yet. Start it first: make run, or vigil up.") from None
        if user is None:
            usernames = ", ".join(people.order_by("username").values_list("username", flat=True)[:20])
            raise CommandError(f"No active user {username or 'with a sysadmin account'}. Users: {usernames}.")
        note(None, "login_link.made", user.username)
        self.stdout.write(f"Sign in: {actions.make_link(user, at=actions.last_address())}")
