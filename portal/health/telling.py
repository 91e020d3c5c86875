"""Notify sysadmins of what stays wrong: once it has lasted for two minutes, which no restart by the supervisor does."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from portal import notify
from portal.health.finding import Finding
from portal.health.run import Report

KIND = "portal.health"
LASTS_S = 120.0
MISSED = 3  # reports without it, one after another, before it is withdrawn: one that comes and goes is one notification


@dataclass
class Telling:
    """What this process has seen so far; a standing notice of another process is withdrawn by either."""

    since: dict[str, float] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)

    def take(self, report: Report) -> None:
        """Raise what has lasted, withdraw what is over."""
        found = {finding.code: finding for finding in report.findings}
        for code in found:
            self.since.setdefault(code, report.made_at)
            self.missing.pop(code, None)
        for code in [code for code in self.since if code not in found]:
            self.missing[code] = self.missing.get(code, 0) + 1
            if self.missing[code] >= MISSED:
                del self.since[code], self.missing[code]
        for code, finding in found.items():
            if time.monotonic() - self.since[code] >= LASTS_S:
                _raise(finding)
        notify.withdraw_missing(KIND, [_key(code) for code in self.since])


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
