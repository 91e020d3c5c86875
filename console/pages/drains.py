"""Render /drains: every node out of service, who took it out, whether that is still true, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from console.pages.cluster import is_fragment, stale_text, vary_on_fragment
from jobs.burnins import start as burnins
from nodes.burnin import plan
from nodes.cluster import drain as orders
from nodes.drains import cost, overview
from nodes.drains.overview import DrainedNode
from nodes.drains.reasons import DrainHolder
from nodes.drains.standing import ReasonStanding
from nodes.models import BurnInNode, HotSpare, MaintenanceWindow, NodeOrder, Partition, Reading
from portal.access import CLUSTER, can, user_of
from portal.models import User
from vigil_core import formatting

MOST = 200
"""Nodes on the page; the others are listed by REST."""
_HOLDER_TEXTS = {
    DrainHolder.RULE: "by Vigil’s rule",
    DrainHolder.PERSON: "by",
    DrainHolder.MAINTENANCE: "for maintenance",
    DrainHolder.SPARE: "as a hot spare",
    DrainHolder.BURN_IN: "for a burn-in",
}


@dataclass(frozen=True)
class DrainRow:
    """A node out of service, as one person sees it."""

    drained: DrainedNode
    is_by_another: bool
    burn_in: int | None = None
    """The burn-in that tests it, or waits until it may."""

    @property
    def holder_text(self) -> str:
        """Return "by ops", "by Vigil’s rule off-bus", "by Slurm"; "by nobody known" if nothing says so."""
        holder, name = self.drained.holder, self.drained.holder_name
        if holder in (DrainHolder.MAINTENANCE, DrainHolder.SPARE, DrainHolder.BURN_IN):
            return _HOLDER_TEXTS[holder]
        if not name:
            return "by nobody known"
        if holder == DrainHolder.UNKNOWN:
            return f"by {name} (a person or a script)"
        return f"{_HOLDER_TEXTS.get(holder, 'by')} {name}"

    @property
    def standing(self) -> str:
        return {
            ReasonStanding.OVER: "no longer true",
            ReasonStanding.STANDS: "still true",
            ReasonStanding.UNKNOWN: "not checked",
        }[self.drained.judgement.standing]

    @property
    def facts(self) -> str:
        """Return the facts as one sentence; "" without any."""
        text = "; ".join(self.drained.judgement.facts)
        return f"{text[0].upper()}{text[1:]}." if text else ""

    @property
    def cost(self) -> str:
        return cost.hourly_text(self.drained.idle_gpus)

    @property
    def glyph(self) -> str:
        if self.drained.is_over:
            return "notice"
        return "failed" if self.drained.node.state.startswith("down") else "warn"

    @property
    def needs_agreement(self) -> bool:
        """Return whether a person, or a site's program, must agree that it returns if it passes a burn-in."""
        node = self.drained.node
        return node.is_drained and burnins.is_drain_of_person(node, self.drained.last_order)

    @property
    def may_be_tested(self) -> bool:
        """Return whether a burn-in could test it: one that is down must be repaired first."""
        return self.drained.node.is_drained and not self.drained.node.is_made_up and self.burn_in is None

    @property
    def may_return(self) -> bool:
        """Return whether an undrain order makes sense: the scheduler knows the node and none waits already."""
        pending = self.drained.pending
        is_waiting = pending is not None and pending.action == NodeOrder.Action.UNDRAIN
        return not self.drained.node.is_made_up and not is_waiting


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    return page(request)


def page(request: HttpRequest, *, spare: tuple[str, str] = ("", ""), spare_mistake: str = "") -> HttpResponse:
    """Return the page. `spare`: node and partition of a form that names a spare, if it was refused."""
    user, now = user_of(request), timezone.now()
    nodes = list(overview.out_of_service().order_by("name")[: MOST + 1])
    tested = BurnInNode.objects.filter(is_active=True, node__in=[node.name for node in nodes])
    burn_ins = dict(tested.values_list("node", "burn_in"))
    rows = [_row(drained, user, burn_ins.get(drained.node.name)) for drained in overview.described(nodes[:MOST], now)]
    spares = {spare.node: spare for spare in HotSpare.objects.all()}
    standing_by = [row for row in rows if row.drained.holder == DrainHolder.SPARE]
    rows = [row for row in rows if row not in standing_by]
    rows.sort(key=lambda row: (not row.drained.is_over, -row.drained.idle_gpus, row.drained.node.name))
    context = {
        "section": "cluster",
        "place": "drains",
        "stale": stale_text(Reading.Part.NODES, now),
        "headline": headline(rows, len(standing_by)),
        "spares": [(spare, name in {row.drained.node.name for row in standing_by}) for name, spare in spares.items()],
        "partitions": Partition.objects.reported().values_list("name", flat=True),
        "sent_spare": spare,
        "spare_mistake": spare_mistake,
        "rows": rows,
        "has_more": len(nodes) > MOST,
        "most": MOST,
        "windows": MaintenanceWindow.objects.standing().order_by("starts_at")[:5],
        "may_change": can(user, "change", CLUSTER),
        "most_reason": orders.MOST_REASON,
        "burn_in_s": plan.DEFAULT_SECONDS,
    }
    template = "nodes/_drains.html" if is_fragment(request) else "nodes/drains.html"
    return vary_on_fragment(render(request, template, context, status=422 if spare_mistake else 200))


def _row(drained: DrainedNode, user: User, burn_in: int | None) -> DrainRow:
    return DrainRow(drained, orders.is_drain_of_another(drained.node, drained.last_order, user), burn_in)


def headline(rows: Sequence[DrainRow], standing_by: int = 0) -> tuple[str, str]:
    """Return the page's lead: how many nodes are out and what they cost; then how many could return, and spares."""
    stand = "stands" if standing_by == 1 else "stand"
    rest = f"{formatting.plural(standing_by, 'hot spare')} {stand} by." if standing_by else ""
    if not rows:
        return ("All other nodes are in service." if standing_by else "All nodes are in service."), rest
    lost = cost.hourly_text(sum(row.drained.idle_gpus for row in rows))
    are = "is" if len(rows) == 1 else "are"
    lead = f"{formatting.plural(len(rows), 'node')} {are} out of service{f': {lost}' if lost else ''}."
    over = [row.drained.node.name for row in rows if row.drained.is_over]
    if not over:
        return lead, rest
    names = over[0] if len(over) == 1 else formatting.plural(len(over), "node")
    return lead, f"The reason no longer holds for {names}. {rest}".strip()
