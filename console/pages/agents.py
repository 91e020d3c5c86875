"""The page of agents: what tells of each machine, worst first; and the secret with which many enrol, for sysadmins."""

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

from console.pages.cluster import is_fragment, sysadmin_of, varied
from nodes.agent.version import VERSION
from nodes.cluster.racks import natural
from nodes.models import Agent, EnrolmentSecret, Node, NodeEvent
from nodes.telemetry import enrolment
from nodes.telemetry.intake import CLOCK_S
from portal.access import CLUSTER, can, user_of
from vigil_core import formatting
from vigil_core.untrusted import whole

MOST = 200  # a page
PAST = timedelta(days=7)  # of which gaps are counted
NEVER, SILENT, CLOCK, GAPS, WELL = range(5)
WORDS = {
    SILENT: "silent",
    NEVER: "never heard",
    CLOCK: "its clock is off",
    GAPS: "samples are missing",
    WELL: "well",
}
GLYPHS = {SILENT: "node_fail", NEVER: "pending", CLOCK: "warn", GAPS: "warn", WELL: "completed"}


@dataclass(frozen=True)
class AgentRow:
    """How a machine's agent stands."""

    agent: Agent
    gaps: int  # that it told of in the last days
    given_up: int  # batches, ever
    gpus: int
    now: datetime

    @property
    def standing(self) -> int:
        if self.agent.heard_at is None:
            return NEVER
        if self.agent.is_silent(self.now) and not self.agent.is_made_up:
            return SILENT
        if abs(self.agent.clock_offset_s or 0) > CLOCK_S:
            return CLOCK
        return GAPS if self.gaps else WELL

    @property
    def word(self) -> str:
        return WORDS[self.standing]

    @property
    def glyph(self) -> str:
        return GLYPHS[self.standing]

    @property
    def clock(self) -> str:
        """ "+0.3 s", "−2 min 04 s"."""
        offset = self.agent.clock_offset_s
        if offset is None:
            return formatting.MISSING
        sign = "−" if offset < 0 else "+"
        return f"{sign}{formatting.duration(abs(offset))}" if abs(offset) >= 0.05 else f"0{formatting.NBSP}s"

    @property
    def is_other_version(self) -> bool:
        """Whether it runs another agent than this portal brings along."""
        return bool(self.agent.version) and self.agent.version != VERSION and not self.agent.is_made_up

    @property
    def place(self) -> tuple[object, ...]:
        """Worst first: what fell silent, the longest first; then clocks, gaps, who never came, and who is well."""
        order = (SILENT, CLOCK, GAPS, NEVER, WELL).index(self.standing)
        heard = self.agent.heard_at.timestamp() if self.standing == SILENT and self.agent.heard_at else 0.0
        return order, heard, natural(self.agent.node)


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    return _page(request)


@login_required
@require_POST
def make_secret(request: HttpRequest) -> HttpResponse:
    """Answers with the page itself, not a redirect: the secret is shown this once and kept nowhere."""
    row, secret = enrolment.make_secret(sysadmin_of(request, "enrol machines"))
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
        "say": say(found, now),
        "rows": found[first : first + MOST],
        "found": len(found),
        "first": first + 1,
        "last": min(len(found), first + MOST),
        "before": max(0, first - MOST) if first else None,
        "after": first + MOST if first + MOST < len(found) else None,
        "without": without,
        "version": VERSION,
        "may_enroll": can(user, "change", CLUSTER),
        "new": new,
        "secret": secret,
        "past_days": PAST.days,
    }
    return varied(render(request, "nodes/_agents.html" if is_fragment(request) else "nodes/agents.html", context))


def rows(now: datetime) -> list[AgentRow]:
    """Every agent, worst first."""
    told = NodeEvent.objects.filter(kind="agent.gap", at__gte=now - PAST).order_by()
    gaps = dict(told.values_list("agent").annotate(n=Count("pk")))
    agents: Any = Agent.objects.described()
    found = [AgentRow(one, gaps.get(one.pk, 0), one.lost_batches, one.gpu_count, now) for one in agents]
    return sorted(found, key=lambda row: row.place)


def say(found: Sequence[AgentRow], now: datetime) -> tuple[str, str]:
    """The sentence that leads the page: who is silent, else that nobody is; then clocks and gaps."""
    if not found:
        return "No machine has an agent yet.", "Until one has, Vigil knows of nodes what the scheduler says."
    silent = [row for row in found if row.standing == SILENT]
    heard = [row for row in found if row.standing != NEVER]
    if not silent:
        lead = "No agent has been heard yet." if not heard else _all_well(len(heard))
    else:
        names = [
            f"{row.agent.node} since {formatting.clock(row.agent.heard_at, now)}"
            for row in silent[:3]
            if row.agent.heard_at
        ]
        many = len(silent)
        more = f" and {formatting.count(many - 3)} more" if many > 3 else ""
        are = "is" if many == 1 else "are"
        of = formatting.plural(len(heard), "agent")
        lead = f"{formatting.count(many)} of {of} {are} silent: {', '.join(names)}{more}."
    return lead, " ".join(part for part in (_clocks(found), _gaps(found), _never(found)) if part)


def _all_well(many: int) -> str:
    return "The agent reports." if many == 1 else f"All {formatting.plural(many, 'agent')} report."


def _clocks(found: Sequence[AgentRow]) -> str:
    off = [row for row in found if row.standing == CLOCK]
    if not off:
        return ""
    if len(off) == 1:
        return f"The clock of {off[0].agent.node} is off by {off[0].clock}; the portal’s counts."
    return f"{formatting.plural(len(off), 'clock')} are off by more than a minute; the portal’s counts."


def _gaps(found: Sequence[AgentRow]) -> str:
    missing = [row for row in found if row.gaps]
    if not missing:
        return ""
    which = missing[0].agent.node if len(missing) == 1 else formatting.plural(len(missing), "machine")
    return f"Samples of {which} are missing, from the last {PAST.days} days."


def _never(found: Sequence[AgentRow]) -> str:
    never = [row for row in found if row.standing == NEVER]
    if not never:
        return ""
    if len(never) == 1:
        return f"{never[0].agent.node} is enrolled and has never been heard."
    return f"{formatting.plural(len(never), 'machine')} are enrolled and have never been heard."
