"""Render /health/entries: all health entries, searched by node, rule, state and severity, a page at a time."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import render
from django.views.decorators.http import require_safe

from console.pages.health.page import EntryRow
from nodes.health.rules.rule import SEVERITIES
from nodes.models import HealthEntry
from nodes.models.health import HealthEntryQuerySet
from nodes.monitoring.site_rules import rules_in_force
from nodes.remediation.entry_lists import EntryList
from portal.access import sees_all, user_of
from portal.http.paging import SortOrder, page_or_first
from vigil_core.untrusted import plain

ROWS = 50
WAITING = EntryList.WAITING.value
"""Open entries that wait for a decision, as a choice among the states."""
FIELDS = ("node", "rule", "state", "severity")
_ORDER = SortOrder("id", descending=True)


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    wanted, rules, shows_text = search_of(request.GET), rules_in_force(), sees_all(user_of(request))
    rows = _in_state(wanted.get("state", ""))
    rows = rows.matching(**{name: value for name, value in wanted.items() if name != "state"})
    rows = rows.select_related("gpu", "order", "decided_by").defer("progress")
    found = page_or_first(rows, _ORDER, cursor=request.GET.get("after"), limit=ROWS)
    context = {
        "section": "cluster",
        "place": "health",
        "rows": [EntryRow(entry, rules.get(entry.rule), shows_kernel_text=shows_text) for entry in found.items],
        "next": found.next,
        "wanted": wanted,
        "states": [(WAITING, "waiting for a decision"), *((name, name) for name in HealthEntry.EntryState.values)],
        "severities": reversed(SEVERITIES),
        "rules": sorted(rules),
    }
    return render(request, "nodes/health_entries.html", context)


def _in_state(state: str) -> HealthEntryQuerySet:
    if state == WAITING:
        return HealthEntry.objects.waiting()
    return HealthEntry.objects.in_state(state) if state else HealthEntry.objects.all()


def search_of(params: QueryDict) -> dict[str, str]:
    """Parse the search from the URL; fields that are empty are left out."""
    values = {name: plain(params.get(name, ""))[:255].strip() for name in FIELDS}
    return {name: value for name, value in values.items() if value}
