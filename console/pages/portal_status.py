"""Show sysadmins how Vigil itself is: what /readyz knows, without running a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.utils import timezone

from console.health import heartbeats, processes, run
from console.health.finding import Finding
from console.pages.readiness import BANNER_S, banner
from nodes.models import Agent, Reading
from portal.models import Lease, User
from vigil_core import formatting

ROLES = {
    "web": "web", "follow": "follower", "work": "worker", "diagnose": "diagnosis and notices",
    "tail": "reports on disk", "pull": "exporters", "beat": "scheduled tasks",
}  # fmt: skip


@dataclass(frozen=True)
class StatusLine:
    """Describes the state of one part of Vigil. `address`: the page with details; "" for none."""

    title: str
    text: str
    tone: str = "completed"
    address: str = ""


def status_lines(user: User, now: datetime | None = None) -> list[StatusLine]:
    """Return how Vigil's processes, its polls of the scheduler and its agents are; [] for people who cannot help."""
    if not user.is_sysadmin:
        return []
    now = now or timezone.now()
    findings = banner(user)
    lines = [
        StatusLine(finding.title, f"{finding.detail} {finding.remedy}".strip(), _tone(finding)) for finding in findings
    ]
    return [*lines, *_checks(findings), _processes(findings), *_leases(now), *_polls(now), *_agents(now)]


def _tone(finding: Finding) -> str:
    return "failed" if finding.level == "error" else "warn"


def _checks(findings: Sequence[Finding]) -> list[StatusLine]:
    """Return that the checks found nothing; without a recent report nothing is claimed."""
    report = run.latest(BANNER_S)
    if report is None or findings:
        return []
    names = formatting.listed(["Database", "Redis", "disks", "backup", "clocks"])
    return [StatusLine("Checks", f"{names}: no problem found.")]


def _leases(now: datetime) -> list[StatusLine]:
    """Return which process follows jobs: the one that has the lease."""
    lease = Lease.objects.filter(name="follow", expires_at__gt=now).first()
    return [StatusLine("Follower", f"Jobs are followed by {lease.holder}.")] if lease is not None else []


def _processes(findings: Sequence[Finding]) -> StatusLine:
    found = [process for process in heartbeats.processes() if not process.is_silent]
    alive = {process.role for process in found}
    missing = [ROLES.get(role, role) for role in processes.required() if role not in alive]
    text = f"{formatting.plural(len(found), 'process reports', 'processes report')}"
    busy = max(found, key=lambda process: process.task_seconds, default=None)
    if busy is not None and busy.task and busy.task_seconds >= 1:
        text += f"; the longest task is {busy.task}, for {formatting.duration(busy.task_seconds)}"
    if missing:
        return StatusLine("Processes", f"{text}; silent: {', '.join(missing)}.", "warn" if not findings else "failed")
    return StatusLine("Processes", f"{text}.")


def _polls(now: datetime) -> list[StatusLine]:
    rows = list(Reading.objects.all())
    failing = [row for row in rows if row.failing_since is not None]
    if failing:
        since = min(row.failing_since for row in failing if row.failing_since is not None)
        names = ", ".join(str(row.part) for row in failing)
        text = f"Polls of {names} have failed since {formatting.clock(since, now)}: {failing[0].error}"
        return [StatusLine("Scheduler", text, "failed")]
    newest = max((row.read_at for row in rows if row.read_at is not None), default=None)
    if newest is None:
        return []
    return [StatusLine("Scheduler", f"Last polled {formatting.ago(newest, now)}.")]


def _agents(now: datetime) -> list[StatusLine]:
    agents = Agent.objects.filter(is_made_up=False).exclude(heard_at=None)
    number, silent = agents.count(), agents.silent(now).count()
    if not number:
        return []
    text = f"{formatting.plural(number, 'agent')}"
    return [
        StatusLine(
            "Agents",
            f"{text}, {silent} silent." if silent else f"{text} report{'s' if number == 1 else ''}.",
            "warn" if silent else "completed",
            "agents",
        )
    ]
