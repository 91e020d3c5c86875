"""Render /drains: every node out of service, who took it out, whether the problem persists, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from console.pages.freshness import stale_text
from console.pages.requests import is_fragment, vary_on_fragment
from jobs.burnins import start as burnins
from nodes.burnin import plan
from nodes.cluster import drain as orders
from nodes.cluster import sync
from nodes.drains import cost, overview
from nodes.drains.overview import DrainedNode
from nodes.drains.reasons import DrainHolder
from nodes.drains.validity import ReasonValidity
from nodes.models import BurnInNode, HotSpare, MaintenanceWindow, Node, NodeOrder, Partition, Reading
from nodes.scheduling import node_states
from portal.access import CLUSTER, can, user_of
from portal.models import User
from vigil_core import formatting

MAX_NODES = 100
"""Nodes on the page, the most costly; the others are listed by REST.

Only these are judged: for 1,000 nodes that takes 0.2 s of CPU, and the page refreshes itself.
"""
_HOLDER_TEXTS = {
    DrainHolder.RULE: "by Vigil’s rule",
    DrainHolder.PERSON: "by",
    DrainHolder.MAINTENANCE: "for maintenance",
    DrainHolder.SPARE: "as a hot spare",
    DrainHolder.BURN_IN: "after a burn-in",
}


class OutNode(NamedTuple):
    """What the headline needs of every node out of service, listed or not."""

    name: str
    state: str
    reason: str
    gpus: int
    gpus_used: int

    @property
    def idle_gpus(self) -> int:
        return max(0, self.gpus - self.gpus_used)

    @property
    def is_standby(self) -> bool:
        return node_states.is_drained(self.state) and node_states.is_standby(self.reason)


@dataclass(frozen=True)
class DrainRow:
    """A node out of service, as one person sees it."""

    drained: DrainedNode
    is_by_another: bool
    burn_in: int | None = None
    """The burn-in that tests it, or waits until it may."""
    failed_burn_in: int | None = None
    """The burn-in after which it was drained."""
    was_drained_by_person: bool = False
    """Before that burn-in."""

    @property
    def holder_text(self) -> str:
        """Return " by ops", " by Vigil’s rule off-bus, approved by ops" or, if it is down, " (reason set by ops)"."""
        holder, name = self.drained.holder, self.drained.holder_name
        if holder in (DrainHolder.MAINTENANCE, DrainHolder.SPARE, DrainHolder.BURN_IN):
            return f" {_HOLDER_TEXTS[holder]}"
        if not name:
            return ""
        if holder == DrainHolder.UNKNOWN:
            text = f"by {name}, a person or a script,"
        else:
            approved = f", approved by {self.drained.approved_by}" if self.drained.approved_by else ""
            text = f"{_HOLDER_TEXTS.get(holder, 'by')} {name}{approved}"
        return f" {text}" if self.drained.node.is_drained else f" (reason set {text.removesuffix(',')})"

    @property
    def standing(self) -> str:
        return {
            ReasonValidity.OUTDATED: "problem gone",
            ReasonValidity.VALID: "problem persists",
            ReasonValidity.UNKNOWN: "not checked",
        }[self.drained.judgement.validity]

    @property
    def facts(self) -> str:
        """Return the facts as one sentence; "" without any."""
        text = "; ".join(self.drained.judgement.facts)
        return f"{text[0].upper()}{text[1:]}." if text else ""

    @property
    def cost(self) -> str:
        return cost.idle_text(self.drained.idle_gpus)

    @property
    def glyph(self) -> str:
        if self.drained.is_over:
            return "notice"
        return "failed" if self.drained.node.state.startswith("down") else "warn"

    @property
    def needs_agreement(self) -> bool:
        """Return whether a person, or a site's program, must agree that it returns if it passes a burn-in."""
        node = self.drained.node
        is_persons = self.was_drained_by_person or burnins.was_drained_outside_vigil_rules(
            node, self.drained.last_order
        )
        return node.is_drained and is_persons

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
    spares = {spare.node: spare for spare in HotSpare.objects.all()}
    out = [OutNode(*values) for values in overview.out_of_service().values_list(*OutNode._fields).order_by("name")]
    standing_by = {node.name for node in out if node.name in spares and node.is_standby}
    out = sorted((node for node in out if node.name not in standing_by), key=lambda node: (-node.idle_gpus, node.name))
    rows = _rows([node.name for node in out[:MAX_NODES]], user, now)
    context = {
        "section": "cluster",
        "place": "drains",
        "stale": stale_text(Reading.Part.NODES, now),
        "headline": headline(out, rows, len(standing_by)),
        "spares": [(spare, name in standing_by) for name, spare in spares.items()],
        "partitions": Partition.objects.reported().values_list("name", flat=True),
        "sent_spare": spare,
        "spare_mistake": spare_mistake,
        "rows": rows,
        "has_more": len(out) > MAX_NODES,
        "most": MAX_NODES,
        "windows": MaintenanceWindow.objects.unfinished().order_by("starts_at")[:5],
        "may_change": can(user, "change", CLUSTER),
        "most_reason": orders.MAX_REASON,
        "burn_in_s": plan.DEFAULT_SECONDS,
    }
    template = "nodes/_drains.html" if is_fragment(request) else "nodes/drains.html"
    return vary_on_fragment(render(request, template, context, status=422 if spare_mistake else 200))


def _rows(names: Sequence[str], user: User, now: datetime) -> list[DrainRow]:
    """Return these nodes, those first whose problem is gone, then the most costly."""
    found = overview.described(Node.objects.filter(name__in=names), now)
    active = dict(BurnInNode.objects.filter(is_active=True, node__in=names).values_list("node", "burn_in"))
    orders_of = [item.order.pk for item in found if item.order is not None and item.holder == DrainHolder.BURN_IN]
    failed = {row.node: row for row in BurnInNode.objects.filter(return_order__in=orders_of).defer("findings")}
    rows, read_at = [], sync.last_read_at(Reading.Part.NODES)
    for item in found:
        name = item.node.name
        is_by_another = orders.is_drained_by_another_given(item.node, item.last_order, user, read_at=read_at)
        before = failed.get(name)
        rows.append(
            DrainRow(
                item, is_by_another, active.get(name),
                failed_burn_in=before.burn_in_id if before else None,
                was_drained_by_person=before is not None and before.was_drained_by_person,
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: (not row.drained.is_over, -row.drained.idle_gpus, row.drained.node.name))


def headline(out: Sequence[OutNode], rows: Sequence[DrainRow], standing_by: int = 0) -> tuple[str, str]:
    """Return the page's lead: how many nodes are out and what they cost; then how many could return, and spares."""
    stand = "stands" if standing_by == 1 else "stand"
    rest = f"{formatting.plural(standing_by, 'hot spare')} {stand} by." if standing_by else ""
    if not out:
        return ("All other nodes are in service." if standing_by else "All nodes are in service."), rest
    lost = cost.idle_text(sum(node.idle_gpus for node in out))
    are = "is" if len(out) == 1 else "are"
    lead = f"{formatting.plural(len(out), 'node')} {are} out of service{f': {lost}' if lost else ''}."
    over = [row.drained.node.name for row in rows if row.drained.is_over]
    if not over:
        return lead, rest
    names = over[0] if len(over) == 1 else formatting.plural(len(over), "node")
    subject = "The problem" if len(rows) == len(out) else f"Among the {formatting.count(len(rows))} shown, the problem"
    return lead, f"{subject} is gone on {names}. {rest}".strip()
