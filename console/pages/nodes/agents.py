"""Render the page of agents: each node's agent, worst first; for sysadmins also enrolment secrets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.decorators import login_required
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from console.pages.requests import is_fragment, vary_on_fragment
from nodes.agent.version import VERSION
from nodes.cluster.racks import natural_sort_key
from nodes.models import Agent, EnrolmentSecret, Node, NodeEvent
from nodes.telemetry import enrolment
from nodes.telemetry.intake import CLOCK_S
from portal.access import CLUSTER, can, sysadmin_of, user_of
from vigil_core import formatting
from vigil_core.untrusted import whole

AGENTS_PER_PAGE = 200  # a page
GAP_WINDOW = timedelta(days=7)  # of which gaps are counted
NEVER_REPORTED, SILENT, CLOCK, GAPS, REPORTING = range(5)
WORDS = {
    SILENT: "silent",
    NEVER_REPORTED: "never reported",
    CLOCK: "clock is off",
    GAPS: "samples missing",
    REPORTING: "reporting",
}
GLYPHS = {SILENT: "node_fail", NEVER_REPORTED: "pending", CLOCK: "warn", GAPS: "warn", REPORTING: "completed"}


@dataclass(frozen=True)
class AgentRow:
    """One node's agent with its condition."""

    agent: Agent
    gaps: int  # reported within GAP_WINDOW
    discarded_batches: int  # batches, ever
    gpus: int
    now: datetime

    @property
    def condition(self) -> int:
        if self.agent.heard_at is None:
            return NEVER_REPORTED
        if self.agent.is_silent(self.now) and not self.agent.is_made_up:
            return SILENT
        if abs(self.agent.clock_offset_s or 0) > CLOCK_S:
            return CLOCK
        return GAPS if self.gaps else REPORTING

    @property
    def word(self) -> str:
        return WORDS[self.condition]

    @property
    def glyph(self) -> str:
        return GLYPHS[self.condition]

    @property
    def clock(self) -> str:
        """Return the clock offset as text: "+0.3 s", "−2 min 04 s"."""
        offset = self.agent.clock_offset_s
        if offset is None:
            return formatting.MISSING
        sign = "−" if offset < 0 else "+"
        return f"{sign}{formatting.duration(abs(offset))}" if abs(offset) >= 0.05 else f"0{formatting.NBSP}s"

    @property
    def is_other_version(self) -> bool:
        """Return whether it runs another agent version than the one that ships with this portal."""
        return bool(self.agent.version) and self.agent.version != VERSION and not self.agent.is_made_up

    @property
    def sort_key(self) -> tuple[object, ...]:
        """Sort worst first: silent for longest, then clocks, gaps, never reported, and reporting."""
        order = (SILENT, CLOCK, GAPS, NEVER_REPORTED, REPORTING).index(self.condition)
        last_report = self.agent.heard_at.timestamp() if self.condition == SILENT and self.agent.heard_at else 0.0
        return order, last_report, natural_sort_key(self.agent.node)


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    return _page(request)


@login_required
@require_POST
def make_secret(request: HttpRequest) -> HttpResponse:
    """Answer with the page itself instead of a redirect: the secret is shown only once and stored nowhere."""
    row, secret = enrolment.make_secret(sysadmin_of(request, "enrol nodes"))
    return _page(request, new=row, secret=secret)


def _page(request: HttpRequest, *, new: EnrolmentSecret | None = None, secret: str = "") -> HttpResponse:
    user, now = user_of(request), timezone.now()
    found = rows(now)
    first = min(whole(request.GET.get("from"), 10**6) or 0, max(0, len(found) - 1))
    without = Node.objects.exclude(name__in=Agent.objects.exclude(heard_at=None).values("node")).count()
    context = {
        "section": "cluster",
        "place": "agents",
        "fragment": is_fragment(request),
        "headline": headline(found, now),
        "rows": found[first : first + AGENTS_PER_PAGE],
        "found": len(found),
        "first": first + 1,
        "last": min(len(found), first + AGENTS_PER_PAGE),
        "before": max(0, first - AGENTS_PER_PAGE) if first else None,
        "after": first + AGENTS_PER_PAGE if first + AGENTS_PER_PAGE < len(found) else None,
        "without": without,
        "version": VERSION,
        "may_enroll": can(user, "change", CLUSTER),
        "new": new,
        "secret": secret,
        "past_days": GAP_WINDOW.days,
    }
    return vary_on_fragment(
        render(request, "nodes/_agents.html" if is_fragment(request) else "nodes/agents.html", context)
    )


def rows(now: datetime) -> list[AgentRow]:
    """Return every agent, worst first."""
    gap_events = NodeEvent.objects.filter(kind="agent.gap", at__gte=now - GAP_WINDOW).order_by()
    gaps = dict(gap_events.values_list("agent").annotate(n=Count("pk")))
    agents: Any = Agent.objects.described()
    found = [AgentRow(agent, gaps.get(agent.pk, 0), agent.lost_batches, agent.gpu_count, now) for agent in agents]
    return sorted(found, key=lambda row: row.sort_key)


def headline(found: Sequence[AgentRow], now: datetime) -> tuple[str, str]:
    """Return the page's lead: which agents are silent, or that all report; then clocks and gaps."""
    if not found:
        return "No node has an agent yet.", "Until then Vigil knows only what the scheduler reports about nodes."
    silent = [row for row in found if row.condition == SILENT]
    reporting = [row for row in found if row.condition != NEVER_REPORTED]
    if not silent:
        lead = "No agent has reported yet." if not reporting else _all_report(len(reporting))
    else:
        names = [
            f"{row.agent.node} since {formatting.clock(row.agent.heard_at, now)}"
            for row in silent[:3]
            if row.agent.heard_at
        ]
        many = len(silent)
        more = f" and {formatting.count(many - 3)} more" if many > 3 else ""
        are = "is" if many == 1 else "are"
        of = formatting.plural(len(reporting), "agent")
        lead = f"{formatting.count(many)} of {of} {are} silent: {', '.join(names)}{more}."
    return lead, " ".join(part for part in (_clocks(found), _gaps(found), _never(found)) if part)


def _all_report(many: int) -> str:
    return "The agent reports." if many == 1 else f"All {formatting.plural(many, 'agent')} report."


def _clocks(found: Sequence[AgentRow]) -> str:
    off = [row for row in found if row.condition == CLOCK]
    if not off:
        return ""
    if len(off) == 1:
        return f"The clock of {off[0].agent.node} is off by {off[0].clock}; portal time is used."
    return f"{formatting.plural(len(off), 'clock')} are off by more than a minute; portal time is used."


def _gaps(found: Sequence[AgentRow]) -> str:
    missing = [row for row in found if row.gaps]
    if not missing:
        return ""
    which = missing[0].agent.node if len(missing) == 1 else formatting.plural(len(missing), "node")
    return f"Samples of {which} are missing from the last {GAP_WINDOW.days} days."


def _never(found: Sequence[AgentRow]) -> str:
    never = [row for row in found if row.condition == NEVER_REPORTED]
    if not never:
        return ""
    if len(never) == 1:
        return f"{never[0].agent.node} is enrolled but has never reported."
    return f"{formatting.plural(len(never), 'node')} are enrolled but have never reported."
