"""Render /health: what health rules found, what waits for a sysadmin, what Vigil did, and the rules in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from console.pages import forms
from console.pages.portal_status import status_lines
from console.pages.requests import is_fragment, vary_on_fragment
from nodes.cluster import drain as orders
from nodes.health.rules.rule import Rule
from nodes.models import HealthControl, HealthEntry, Node, NodeOrder
from nodes.models.health import KERNEL_TEXT, PEOPLE
from nodes.monitoring.site_rules import rules_in_force
from nodes.presenting.observations import observed_text
from nodes.remediation import alike, inbox
from nodes.remediation.entry_lists import ActiveEntries, EntryList
from nodes.remediation.limits_used import limits_used
from portal.access import CLUSTER, can, sees_all, sysadmin_of, user_of
from portal.models import User
from vigil_core import formatting

MAX_ENTRIES = {EntryList.WAITING: 50, EntryList.OPEN: 50, EntryList.WATCHED: 50}
"""Entries of each list; the page of all entries has the rest."""
MAX_PAST = 20
GLYPHS = {"fatal": "failed", "critical": "failed", "warning": "warn", "info": "notice"}
State = HealthEntry.EntryState


@dataclass(frozen=True)
class EntryRow:
    """An entry with its rule, which may have been removed since; or one of `number` equal ones."""

    entry: HealthEntry
    rule: Rule | None
    number: int = 1
    shows_kernel_text: bool = False

    @property
    def glyph(self) -> str:
        return GLYPHS.get(self.entry.severity, "warn")

    @property
    def subject(self) -> str:
        """Return what it is about, if that is not a node: a rack, a program, the cluster."""
        if self.rule is not None and self.rule.subject == "rack":
            return f"rack {self.entry.item}"
        return self.entry.item or "the cluster"

    @property
    def where(self) -> str:
        if not self.entry.node:
            return ""
        if self.entry.gpu is not None:
            return f"GPU{formatting.NBSP}{self.entry.gpu.index}"
        return self.entry.item

    @property
    def places(self) -> str:
        """Return how many nodes or other places equal entries are about."""
        is_by_node = self.entry.gpu is None and not self.entry.item  # one active entry a node and rule
        words = ("node",) if is_by_node else ("place",)
        return formatting.plural(self.number, *words)

    @property
    def order_text(self) -> str:
        """Return what became of the entry's order: "Drained by Vigil.", "Drain, approved by ops. Refused: …"."""
        entry, order = self.entry, self.entry.order
        if order is None:
            return ""
        by = ""
        if entry.decision == HealthEntry.EntryDecision.AUTOMATIC:
            by = f", approved by {order.asked_by.username}" if order.asked_by else " by Vigil"
        elif entry.decided_by:
            by = f", approved by {entry.decided_by.username}"
        action = order.get_action_display()
        if order.state == NodeOrder.State.DONE:
            return f"{action}ed{by}."
        return f"{action}{by}. {order.outcome_text}"

    @property
    def advice(self) -> str:
        return self.rule.advice if self.rule else ""

    @property
    def observed(self) -> str:
        """Return the newest observation, as far as the rule asks for it; never whose program it was."""
        found = self.entry.observations(hidden=PEOPLE if self.shows_kernel_text else PEOPLE | KERNEL_TEXT)
        if not found:
            return ""
        _, signal, fields, _ = found[-1]
        if signal in ("xid", "sxid"):
            code = f"{'Xid' if signal == 'xid' else 'SXid'} {fields.get('code', '–')}"
            return f"{code}: {fields['text']}".rstrip(".") if fields.get("text") else code
        if signal == "software" and fields.get("below_minimum"):
            return str(fields.get("outdated", ""))
        asked = {name for trigger in self.rule.triggers for name in trigger.where} if self.rule else None
        return observed_text(fields, asked)


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    user, rules, now = user_of(request), rules_in_force(), timezone.now()
    entries, shows_text = ActiveEntries(), sees_all(user)
    control = HealthControl.objects.select_related("reset_by").filter(pk=HealthControl.ID).first()
    acts = settings.VIGIL_HEALTH == "act"
    cleared = HealthEntry.objects.filter(state=State.CLEARED).order_by("-cleared_at")
    context = {
        "section": "cluster",
        "place": "health",
        "headline": headline(entries),
        "lists": {which.value: _EntryRows.read(entries, which, rules, shows_text) for which in EntryList},
        "cleared": [
            EntryRow(entry, rules.get(entry.rule), shows_kernel_text=shows_text)
            for entry in cleared.select_related("gpu", "decided_by").defer("progress")[:MAX_PAST]
        ],
        "orders": NodeOrder.objects.by_health_rules()[:MAX_PAST],
        "breaker": control if control is not None and control.tripped_at else None,
        "limits": limits_used(now) if acts else None,
        "acts": acts,
        "may_decide": can(user, "change", CLUSTER),
        "most_reason": orders.MAX_REASON,
        "rules": len(rules),
        "portal_status": status_lines(user, now),
    }
    return vary_on_fragment(
        render(request, "nodes/_health.html" if is_fragment(request) else "nodes/health.html", context)
    )


@login_required
@require_POST
def decide(request: HttpRequest, entry_id: int, action: str) -> HttpResponse:
    """Approve, dismiss or clear an entry; return to the page of its node if the form was there."""
    user = sysadmin_of(request, "decide about findings")
    came_from = _page_of_form(request, entry_id)
    try:
        _decide(request, user, action, entry_id, forms.reason(request))
    except HealthEntry.DoesNotExist as error:
        raise Http404(str(error)) from None
    except orders.NeedsConfirmation as error:
        messages.error(request, f"{error} Nothing was changed.")
    except (forms.BadReason, inbox.NotPossible) as error:
        messages.error(request, str(error))
    return came_from


def _page_of_form(request: HttpRequest, entry_id: int) -> HttpResponse:
    node = HealthEntry.objects.filter(pk=entry_id).values_list("node", flat=True).first()
    return redirect("node", node) if node and request.POST.get("next") == "node" else redirect("health")


def _decide(request: HttpRequest, user: User, action: str, entry_id: int, reason: str) -> None:
    if action not in _DECISIONS:
        raise Http404(f"{action} is not a decision.")
    if not request.POST.get("alike"):
        _DECISIONS[action](user, entry_id, reason)
        return
    outcome = alike.decide(user, action, entry_id, reason)
    left = f" Unchanged: {formatting.count(outcome.left)}." if outcome.left else ""
    done = {"approve": "Approved", "dismiss": "Dismissed", "clear": "Cleared"}[action]
    messages.success(request, f"{done} {formatting.plural(outcome.decided + 1, 'finding')}.{left}")


_DECISIONS: dict[str, Callable[[User, int, str], Any]] = {
    "approve": inbox.approve,
    "dismiss": inbox.dismiss,
    "clear": inbox.clear,
}


@login_required
@require_POST
def reset_breaker(request: HttpRequest) -> HttpResponse:
    user = sysadmin_of(request, "reset the breaker")
    try:
        inbox.reset_breaker(user, forms.reason(request))
    except (forms.BadReason, inbox.NotPossible) as error:
        messages.error(request, str(error))
    return redirect("health")


@dataclass(frozen=True)
class _EntryRows:
    """One list of the page: its most urgent entries, and how many there are."""

    rows: list[EntryRow]
    number: int

    @classmethod
    def read(cls, entries: ActiveEntries, which: EntryList, rules: Mapping[str, Rule], shows_text: bool) -> _EntryRows:
        lines = entries.newest(which, MAX_ENTRIES[which])
        rows = [EntryRow(line.entry, rules.get(line.entry.rule), line.number, shows_text) for line in lines]
        return cls(rows, entries.count(which))

    @property
    def more(self) -> int:
        return max(0, self.number - sum(row.number for row in self.rows))


def headline(entries: ActiveEntries) -> tuple[str, str]:
    """Return the page's lead: what waits for a decision, else what is open; then what is watched."""
    waiting, watched = entries.count(EntryList.WAITING), entries.count(EntryList.WATCHED)
    rest = f"{formatting.plural(watched, 'finding')} {'is' if watched == 1 else 'are'} watched." if watched else ""
    if waiting:
        verb = "waits" if waiting == 1 else "wait"
        return f"{formatting.plural(waiting, 'finding')} {verb} for a decision.", rest
    names, out = entries.nodes_to_repair(3)
    if out:
        shown = ", ".join(names) + (f" and {out - 3} more" if out > 3 else "")
        return f"{shown} {'needs' if out == 1 else 'need'} repair.", rest
    if found := entries.count(EntryList.OPEN):
        return f"{formatting.plural(found, 'finding')}, none of which takes a node out of service.", rest
    if not Node.objects.reported().exists():
        return "No node is known yet.", "Findings appear here once nodes and their agents report."
    return "Nothing is wrong with the nodes that report.", rest
