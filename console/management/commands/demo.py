"""A made-up lab to look around in."""

import time
from typing import Any

from django.core.management.base import BaseCommand

from console.demo import lab, telemetry


class Command(BaseCommand):
    help = "Add a believable lab: people, projects, jobs that ended well and badly, and one that runs."
    requires_system_checks = ()

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--live", action="store_true", help="let its machines tell what they do, for ever")

    def handle(self, *args: object, **options: object) -> None:
        if options["live"]:
            _go_on()
        made = lab.make()
        self.stdout.write(f"Made {len(made)} jobs." if made else "The demonstration lab is there already.")


def _go_on() -> None:
    while True:
        time.sleep(telemetry.PERIOD_S - time.time() % telemetry.PERIOD_S)
        telemetry.tell()
