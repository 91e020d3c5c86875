"""Render /health: what health rules found, what waits for a sysadmin, what Vigil did, and the rules in force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.db.models import Case, IntegerField, Value, When
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from console.pages.cluster import is_fragment, sysadmin_of, varied
from nodes.cluster import drain as orders
from nodes.health.rules.rule import OUT_OF_SERVICE, SEVERITIES, Rule
from nodes.models import HealthControl, HealthEntry, Node, NodeOrder
from nodes.monitoring.site_rules import rules_in_force
from nodes.remediation import inbox
from portal.access import CLUSTER, can, user_of
from portal.models import User
from vigil_core import formatting
from vigil_core.untrusted import plain

MOST = 200
"""Entries of each list: what is more is found by node, or over REST."""
MOST_ORDERS = 20
GLYPHS = {"fatal": "failed", "critical": "failed", "warning": "warn", "info": "notice"}
Decision = HealthEntry.EntryDecision
State = HealthEntry.EntryState


@dataclass(frozen=True)
class EntryRow:
    """An entry with its rule, which may have been removed since."""

    entry: HealthEntry
    rule: Rule | None

    @property
    def glyph(self) -> str:
        return GLYPHS.get(self.entry.severity, "warn")

    @property
    def subject(self) -> str:
        """Return what it is about, if that is not a node: a rack, a program, the cluster."""
        return self.entry.item or "the cluster"

    @property
    def where(self) -> str:
        if not self.entry.node:
            return ""
        if self.entry.gpu is not None:
            return f"GPU{formatting.NBSP}{self.entry.gpu.index}"
        return self.entry.item

    @property
    def advice(self) -> str:
        return self.rule.advice if self.rule else ""

    @property
    def needs_decision(self) -> bool:
        return self.entry.decision == Decision.PROPOSED and self.entry.state == State.OPEN

    @property
    def is_open(self) -> bool:
        """Return whether it matters to sysadmins: what a rule ignores is only counted."""
        return self.entry.state != State.WATCHING and self.entry.action != "ignore"

    @property
    def observed(self) -> str:
        """Return the newest observation, as far as the rule asks for it; never whose program it was."""
        if not self.entry.evidence:
            return ""
        _, signal, fields, _ = self.entry.evidence[-1]
        if signal in ("xid", "sxid"):
            code = f"{'Xid' if signal == 'xid' else 'SXid'} {fields.get('code', '–')}"
            return f"{code}: {fields['text']}".rstrip(".") if fields.get("text") else code
        asked = {name for trigger in self.rule.triggers for name in trigger.where} if self.rule else set(fields)
        return ", ".join(f"{name} {field_text(value)}" for name, value in fields.items() if name in asked)


def field_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return formatting.measure(value) if isinstance(value, int | float) else str(value)


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    user, rules = user_of(request), rules_in_force()
    rows = _rows(HealthEntry.objects.active(), rules)
    control = HealthControl.objects.select_related("reset_by").filter(pk=HealthControl.ID).first()
    waiting = [row for row in rows if row.needs_decision]
    context = {
        "section": "cluster",
        "place": "health",
        "headline": headline(rows, len(waiting)),
        "waiting": waiting,
        "open": [row for row in rows if row.is_open and not row.needs_decision],
        "watching": [row for row in rows if not row.is_open],
        "cleared": _rows(HealthEntry.objects.filter(state=State.CLEARED), rules, most=MOST_ORDERS, order="-cleared_at"),
        "orders": NodeOrder.objects.exclude(rule="")[:MOST_ORDERS],
        "breaker": control if control is not None and control.tripped_at else None,
        "acts": settings.VIGIL_HEALTH == "act",
        "may_decide": can(user, "change", CLUSTER),
        "most_reason": orders.MOST_REASON,
        "rules": len(rules),
    }
    return varied(render(request, "nodes/_health.html" if is_fragment(request) else "nodes/health.html", context))


@login_required
@require_POST
def decide(request: HttpRequest, entry_id: int, action: str) -> HttpResponse:
    """Approve, dismiss or clear an entry."""
    user = sysadmin_of(request, "decide about health entries")
    reason = " ".join(plain(request.POST.get("reason", "")).split())
    if not reason or len(reason) > orders.MOST_REASON:
        messages.error(request, f"Enter a reason of at most {orders.MOST_REASON} characters.")
        return redirect("health")
    try:
        _DECISIONS[action](user, entry_id, reason)
    except KeyError:
        raise Http404(f"{action} is not a decision.") from None
    except HealthEntry.DoesNotExist as error:
        raise Http404(str(error)) from None
    except orders.DrainedByAnother as error:
        messages.error(request, f"{error} Nothing was changed.")
    except inbox.NotPossible as error:
        messages.error(request, str(error))
    return redirect("health")


_DECISIONS: dict[str, Callable[[User, int, str], Any]] = {
    "approve": inbox.approve,
    "dismiss": inbox.dismiss,
    "clear": inbox.clear,
}


@login_required
@require_POST
def reset_breaker(request: HttpRequest) -> HttpResponse:
    user = sysadmin_of(request, "reset the breaker")
    reason = " ".join(plain(request.POST.get("reason", "")).split())[: orders.MOST_REASON]
    if not reason:
        messages.error(request, "Enter why the rule fired on so many nodes.")
        return redirect("health")
    try:
        inbox.reset_breaker(user, reason)
    except inbox.NotPossible as error:
        messages.error(request, str(error))
    return redirect("health")


def _rows(entries: Any, rules: Any, *, most: int = MOST, order: str = "") -> list[EntryRow]:
    urgency = Case(
        *(When(severity=name, then=Value(place)) for place, name in enumerate(reversed(SEVERITIES))),
        default=Value(len(SEVERITIES)), output_field=IntegerField(),
    )  # fmt: skip
    rows = entries.select_related("gpu", "order", "decided_by").defer("progress")
    ordered = rows.order_by(order) if order else rows.order_by(urgency, "-last_seen")
    return [EntryRow(entry, rules.get(entry.rule)) for entry in ordered[:most]]


def headline(rows: Sequence[EntryRow], waiting: int) -> tuple[str, str]:
    """Return the page's lead: what waits for a decision, else what is open; then what is watched."""
    found = [row for row in rows if row.is_open and row.entry.state == State.OPEN]
    out = {row.entry.node for row in found if row.entry.action in OUT_OF_SERVICE}
    watched = sum(not row.is_open for row in rows)
    rest = f"{formatting.plural(watched, 'more finding')} {'is' if watched == 1 else 'are'} watched." if watched else ""
    if waiting:
        verb = "waits" if waiting == 1 else "wait"
        return f"{formatting.plural(waiting, 'finding')} {verb} for a decision.", rest
    if out:
        names = ", ".join(sorted(out)[:3]) + (f" and {len(out) - 3} more" if len(out) > 3 else "")
        return f"{names} {'needs' if len(out) == 1 else 'need'} repair.", rest
    if found:
        return f"{formatting.plural(len(found), 'finding')}, none of which takes a node out of service.", rest
    nodes = Node.objects.reported().count()
    if not nodes:
        return "No node is known yet.", "Findings appear here once nodes and their agents report."
    return "Nothing is wrong with the nodes that report.", rest
