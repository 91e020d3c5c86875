"""`manage.py check_slurm`: what `vigil check slurm` runs."""

import io
import json
import logging
import sys
from argparse import ArgumentParser
from dataclasses import asdict

from django.core.management.base import BaseCommand

from jobs.checking import here, run
from jobs.checking.finding import Finding
from jobs.checking.trial import PATIENCE_S, Wishes

MARKS = {"ok": "✓", "warn": "!", "error": "✗", "skip": "–"}


class Command(BaseCommand):
    help = "Say line by line whether this site and its Slurm fit together, and what is missing."
    requires_system_checks = ()
    last_remedy = ""  # the same one is not said line after line

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--partition", action="append", default=[])
        parser.add_argument("--user", default="")
        parser.add_argument("--wait", type=float, default=PATIENCE_S)
        parser.add_argument("--no-jobs", action="store_true")

    def handle(self, *args: object, **options: object) -> None:
        logging.getLogger("nodes").setLevel(logging.WARNING)  # the list says it all
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks ✓ gets a question mark
                stream.reconfigure(errors="replace")
        wishes = Wishes(tuple(options["partition"]), str(options["user"]), float(str(options["wait"])))  # type: ignore[arg-type]
        found: list[Finding] = []
        try:
            for finding in run.look(here.site(), None if options["no_jobs"] else wishes, self._tell):
                found.append(finding)
                if not options["json"]:
                    self._say(finding)
        except KeyboardInterrupt:
            sys.exit(130)
        wrong = [one for one in found if one.level == "error"]
        if options["json"]:
            self.stdout.write(json.dumps({"ok": not wrong, "findings": [asdict(one) for one in found]}, indent=2))
        else:
            warned = sum(one.level == "warn" for one in found)
            self.stdout.write(f"\n{len(wrong)} to mend, {warned} to look at, {len(found)} checked.")
        if wrong:
            sys.exit(1)

    def _say(self, finding: Finding) -> None:
        self.stdout.write(f"{MARKS[finding.level]} {finding.title}: {finding.detail}")
        if finding.remedy and finding.remedy != self.last_remedy:
            self.stdout.write(f"    → {finding.remedy}")
        self.last_remedy = finding.remedy
        self.stdout.flush()

    def _tell(self, words: str) -> None:
        """What it waits for, beside the list."""
        self.stderr.write(f"  … {words}")
        self.stderr.flush()
