"""Run `vigil check portal`."""

import json
import sys
from argparse import ArgumentParser
from dataclasses import asdict

from django.core.management.base import BaseCommand

from console.health import run
from vigil_core.formatting import plain_spaces, plural

MARKS = {"unchecked": "–", "warning": "!", "error": "✗"}


class Command(BaseCommand):
    help = "Check whether the portal itself works, and print what to do if it does not."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true")

    def handle(self, *args: object, **options: object) -> None:
        report = run.make()
        if options["json"]:
            found = [asdict(finding) for finding in (*report.findings, *report.unchecked)]
            self.stdout.write(json.dumps({"ok": report.is_ready, "findings": found}, indent=2))
        else:
            self._print(report)
        if not report.is_ready:
            sys.exit(1)

    def _print(self, report: run.Report) -> None:
        wrong = {finding.check for finding in report.findings}
        for name in run.CHECKS:
            if name not in wrong:
                self.stdout.write(f"✓ {name}")
        for finding in (*report.findings, *report.unchecked):
            self.stdout.write(f"{MARKS[finding.level]} {finding.title} {finding.detail}".rstrip())
            if finding.remedy:
                self.stdout.write(f"    → {finding.remedy}")
        errors, warnings = plural(len(report.errors), "error"), plural(len(report.warnings), "warning")
        self.stdout.write(plain_spaces(f"\n{errors}, {warnings}."))
