"""The list of incidents: filters, counts by cause and page are all in the address."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_safe

from diagnosis.causes import CAUSES
from jobs.gathering import verdicts
from jobs.listing.incidents import OWNERS, IncidentCounts, IncidentSearch
from jobs.models import Incident
from jobs.views.spans import SPANS, since
from portal.access import user_of
from portal.http.paging import BadCursor
from portal.models import Project
from vigil_core import formatting
from vigil_core.untrusted import plain

ROWS = 50
FILTERS = ("project", "cause", "owner", "node", "since", "published")
OWNER_WORDS = {
    "researcher": "For researchers",
    "sysadmin": "For sysadmins",
    "both": "For either",
    "nobody": "For nobody",
}


@dataclass(frozen=True)
class IncidentLine:
    """An incident as the list shows it."""

    incident: Incident

    @property
    def url(self) -> str:
        attempt = self.incident.attempt
        if self.incident.ended_its_attempt:
            return f"{reverse('job_postmortem', args=[attempt.job_id])}?attempt={attempt.number}"
        return f"{reverse('job_attempts', args=[attempt.job_id])}#attempt-{attempt.number}"

    @property
    def state(self) -> str:
        return self.incident.attempt.state if self.incident.ended_its_attempt else "warn"

    @property
    def summary(self) -> str:
        return verdicts.summary(self.incident) or "Its logs are being read."


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    user = user_of(request)
    search = search_of(request.GET)
    try:
        page = search.page(user, cursor=request.GET.get("after") or None, limit=ROWS)
    except BadCursor:
        page = search.page(user, limit=ROWS)
    counts = search.counts(user)
    context = {
        "section": "postmortems",
        "rows": [IncidentLine(incident) for incident in page.items],
        "next": page.next,
        "is_first": not request.GET.get("after"),
        "search": search,
        "span": request.GET.get("since", ""),
        "spans": SPANS,
        "owners": [(owner, OWNER_WORDS[owner]) for owner in OWNERS],
        "published": request.GET.get("published", ""),
        "counts": [(code, many) for code, many in counts.by_cause.most_common() if code],
        "is_cut": counts.is_cut,
        "total": counts.total,
        "causes": list(CAUSES),
        "projects": list(Project.objects.visible_to(user).values_list("slug", flat=True)),
        "is_filtered": any(request.GET.get(name) for name in FILTERS),
        "headline": summary(counts, request.GET.get("since", "")),
    }
    return render(request, "jobs/postmortems.html", context)


def search_of(params: QueryDict) -> IncidentSearch:
    """Return the search that the address describes; invalid parameters are ignored."""
    owner, published = params.get("owner", ""), params.get("published", "")
    return IncidentSearch(
        projects=[plain(slug) for slug in params.getlist("project") if slug][:50],
        causes=[cause for cause in params.getlist("cause") if cause in CAUSES],
        owner=owner if owner in OWNERS else "",
        node=plain(params.get("node", "")).strip()[:255],
        is_published={"yes": True, "no": False}.get(published),
        since=since(params.get("since", "")),
    )


def summary(counts: IncidentCounts, span: str) -> tuple[str, str]:
    """Return what failed most, and who has to act."""
    if not counts.total:
        return "", ""
    diagnosed = [(code, many) for code, many in counts.by_cause.most_common() if code in CAUSES]
    when = dict(SPANS).get(span, "").lower() if span else ""
    many = f"{formatting.count(counts.total)}{'+' if counts.is_cut else ''}"
    lead = f"{many} {'incident' if counts.total == 1 else 'incidents'}{f' in the {when}' if when else ''}."
    if not diagnosed:
        return lead, "Their logs are being read."
    code, most = diagnosed[0]
    for_researchers = sum(many for code, many in diagnosed if CAUSES[code].owner == "researcher")
    is_first = most > 1 and all(most > many for _, many in diagnosed[1:2])
    rest = f"Most frequent cause: {CAUSES[code].title} ({formatting.count(most)}×). " if is_first else ""
    return lead, f"{rest}{formatting.share(for_researchers / counts.total)} are for researchers to fix."
