"""Run all checks of the portal's own health. To add one, write a module with `check()` and name it here."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from django.db import DatabaseError

from console.health import backup, clock, database, disk, processes, redis
from console.health.finding import Finding

logger = logging.getLogger(__name__)

CHECKS: dict[str, Callable[[], Iterable[Finding]]] = {
    "database": database.check,
    "redis": redis.check,
    "processes": processes.check,
    "disk": disk.check,
    "backup": backup.check,
    "clock": clock.check,
}
NEEDED_TO_SERVE = ("database",)
"""What this one web process needs to answer requests: for a load balancer (`/readyz?only=web`)."""
PATIENCE_S = 5.0  # for a check that hangs, such as a database server that cannot be reached
IMPLIED = {"redis": "beat"}
"""Findings that another finding explains: beat is only observable through tasks sent over Redis."""
FRESH_S = 5.0  # /readyz is public: however often it is read, the checks run this often at most


@dataclass(frozen=True)
class Report:
    """Findings of all checks, worst first, and separately what could not be checked, which is not a problem."""

    findings: tuple[Finding, ...]
    made_at: float  # monotonic
    unchecked: tuple[Finding, ...] = ()

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "warning"]

    @property
    def is_ready(self) -> bool:
        return not self.errors


_lock = threading.Lock()
_latest: Report | None = None


def current(fresh_s: float = FRESH_S) -> Report:
    """Return a report no older than `fresh_s`; one thread makes it while others wait, for PATIENCE_S at most."""
    global _latest
    if not _lock.acquire(timeout=PATIENCE_S):
        return Report((Finding("checks", "checks", "error", "The checks themselves do not answer."),), time.monotonic())
    try:
        if _latest is None or time.monotonic() - _latest.made_at > fresh_s:
            _latest = make()
        return _latest
    finally:
        _lock.release()


def latest(fresh_s: float) -> Report | None:
    """Return the last report if it is recent enough; never wait."""
    report = _latest
    return report if report and time.monotonic() - report.made_at <= fresh_s else None


def make() -> Report:
    """Run every check now."""
    found = [finding for name in CHECKS for finding in _run(name)]
    explained = {IMPLIED[finding.code] for finding in found if finding.code in IMPLIED}
    found = [finding for finding in found if finding.code not in explained]
    found.sort(key=lambda finding: finding.level != "error")
    wrong = tuple(finding for finding in found if finding.level != "unchecked")
    return Report(wrong, time.monotonic(), tuple(finding for finding in found if finding.level == "unchecked"))


def _run(name: str) -> list[Finding]:
    """Run one check. A check that fails hides no other; without a database only `database` reports it."""
    try:
        return list(CHECKS[name]())
    except DatabaseError:
        return []
    except Exception:
        logger.exception("the check %s failed", name)
        return [Finding(name, name, "warning", f"The check of {name} failed: see the log of web.")]


def serving_report() -> Report:
    """Report only what keeps this web process from answering requests."""
    return Report(tuple(finding for name in NEEDED_TO_SERVE for finding in _run(name)), time.monotonic())
