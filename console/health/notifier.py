"""Notify sysadmins of problems that last: two minutes, longer than any restart by the supervisor takes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta

from console.health.finding import Finding
from console.health.run import Report
from portal import notify
from portal.models import Notice

KIND = "portal.health"
LASTS_S = 120.0
# Longer than a web process takes to start and to run the checks: until then a predecessor's notice stands.
WITHDRAW_AFTER = timedelta(seconds=120)


@dataclass
class Notifier:
    """Raise notices for what one web process finds; those on other machines may find others, such as full disks."""

    since: dict[str, float] = field(default_factory=dict)

    def update(self, report: Report) -> None:
        """Raise findings that have lasted or are raised already; withdraw those that no process has found lately."""
        found = {finding.code: finding for finding in report.findings}
        self.since = {code: self.since.get(code, report.made_at) for code in found}
        standing = set(Notice.objects.active().filter(kind=KIND).values_list("key", flat=True))
        for code, finding in found.items():
            if _key(code) in standing or time.monotonic() - self.since[code] >= LASTS_S:
                _raise(finding)
        if standing:
            notify.withdraw_stale(KIND, WITHDRAW_AFTER)


def _raise(finding: Finding) -> None:
    notify.raise_notice(
        _key(finding.code),
        kind=KIND,
        to=notify.SYSADMINS,
        title=finding.title,
        detail=" ".join(filter(None, (finding.detail, finding.remedy))),
        tone="warn",
    )


def _key(code: str) -> str:
    return f"{KIND}:{code}"
