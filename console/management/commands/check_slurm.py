"""Run `vigil check slurm`."""

import io
import json
import logging
import sys
from argparse import ArgumentParser
from dataclasses import asdict

from django.core.management.base import BaseCommand

from jobs.slurm_check import all_checks, local_site
from jobs.slurm_check.finding import CheckFinding
from jobs.slurm_check.trial import PATIENCE_S, TrialOptions
from vigil_core.formatting import plain_spaces, plural

MARKS = {"ok": "✓", "warn": "!", "error": "✗", "skip": "–"}


class Command(BaseCommand):
    help = "Check line by line whether this site works with its Slurm, and what is missing."
    requires_system_checks = ()
    last_remedy = ""  # a repeated remedy is printed once

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--partition", action="append", default=[])
        parser.add_argument("--user", default="")
        parser.add_argument("--wait", type=float, default=PATIENCE_S)
        parser.add_argument("--no-jobs", action="store_true")

    def handle(self, *args: object, **options: object) -> None:
        logging.getLogger("nodes").setLevel(logging.WARNING)  # the list has everything
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a terminal without ✓ shows a question mark
                stream.reconfigure(errors="replace")
        job_options = TrialOptions(tuple(options["partition"]), str(options["user"]), float(str(options["wait"])))  # type: ignore[arg-type]
        found: list[CheckFinding] = []
        try:
            for finding in all_checks.run_checks(
                local_site.site(), None if options["no_jobs"] else job_options, self._show_progress
            ):
                found.append(finding)
                if not options["json"]:
                    self._print(finding)
        except KeyboardInterrupt:
            sys.exit(130)
        wrong = [item for item in found if item.level == "error"]
        if options["json"]:
            self.stdout.write(json.dumps({"ok": not wrong, "findings": [asdict(item) for item in found]}, indent=2))
        else:
            warnings = plural(sum(item.level == "warn" for item in found), "warning")
            self.stdout.write(plain_spaces(f"\n{plural(len(wrong), 'error')}, {warnings}."))
        if wrong:
            sys.exit(1)

    def _print(self, finding: CheckFinding) -> None:
        self.stdout.write(f"{MARKS[finding.level]} {finding.title}: {finding.detail}")
        if finding.remedy and finding.remedy != self.last_remedy:
            self.stdout.write(f"    → {finding.remedy}")
        self.last_remedy = finding.remedy
        self.stdout.flush()

    def _show_progress(self, text: str) -> None:
        """Print what the check is waiting for on stderr."""
        self.stderr.write(f"  … {text}")
        self.stderr.flush()
