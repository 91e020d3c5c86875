"""Create a demo lab to explore."""

import time
from typing import Any

from django.core.management.base import BaseCommand

from console.demo import lab, telemetry


class Command(BaseCommand):
    help = "Add a realistic lab: people, projects, jobs that succeeded and failed, and a running one."
    requires_system_checks = ()

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--live", action="store_true", help="keep its machines reporting until stopped")

    def handle(self, *args: object, **options: object) -> None:
        if options["live"]:
            _report_forever()
        made = lab.make()
        self.stdout.write(f"Created {len(made)} jobs." if made else "The demo lab exists already.")


def _report_forever() -> None:
    while True:
        time.sleep(telemetry.PERIOD_S - time.time() % telemetry.PERIOD_S)
        telemetry.report_now()
