"""List the addresses that list or count, with queries for each. A test compares it with the site's own addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.urls import get_resolver
from django.urls.resolvers import URLResolver

PAGES = 100
OF_JOBS = (
    "", "state=running", "state=pending", "state=bad", "state=completed", "state=failed", "state=boot_fail",
    "q=lora", "q=lora+large", "q=lora-large-12", "q=lora-large-1234", "q=nothinglikeit", "q=vi", "q=zz", "q=%23777",
    "q=person-03", "q=paper", "owner=person-01", "owner=person-40", "project=project-05", "kind=attached", "tag=paper",
    "sort=name", "sort=-name", "sort=state", "sort=-state", "sort=created", "sort=project", "sort=-project",
    "sort=owner", "sort=-owner", "sort=-started", "sort=-ended", "sort=started", "sort=ended", "sweep=7",
    "state=failed&q=lora", "state=deadline&sort=name", "state=bad&q=large&tag=night&sort=-ended",
    "project=project-00&kind=attached&q=moe&sort=name", "q=lora+night&owner=person-01&sort=-started",
)  # fmt: skip
SINCE = ("since=1d", "since=30d", "since=365d", "owner=person-02&state=node_fail&since=365d")
BETWEEN = (
    "created_before=2025-06-01T00:00:00Z",
    "created_after=2025-06-01T00:00:00Z&created_before=2025-06-20T00:00:00Z&sort=name",
)
# Queries by route. JOB, SWEEP, NODE: an existing one; PAGE n: the address after following n cursors.
REQUESTS: dict[str, tuple[str, ...]] = {
    "": ("",),
    "jobs": (*OF_JOBS, *SINCE, *(f"PAGE {PAGES} sort={sort}" for sort in ("-created", "name"))),
    "jobs/compare": ("",),
    "jobs/<int:job_id>": ("",),
    "jobs/<int:job_id>/attempts": ("",),
    "jobs/<int:job_id>/checkpoints": ("",),
    "sweeps": ("", "PAGE 50"),
    "sweeps/<int:sweep_id>": ("",),
    "postmortems": ("", "cause=gpu.ecc", "owner=sysadmin&since=30d", "project=project-05", "published=yes"),
    "queue": ("", "q=lora", "mine=1"),
    "cluster": ("", "by=heat"),
    "agents": ("",),
    "drains": ("",),
    "health": ("",),
    "announcements": ("",),
    "api/v1/announcements": ("",),
    "maintenance": ("",),
    "api/v1/maintenance": ("",),
    "acceptances": ("",),
    "api/v1/acceptances": ("",),
    "burnins": ("",),
    "api/v1/burnins": ("",),
    "gameday": ("",),
    "api/v1/gamedays": ("",),
    "inventory": ("",),
    "api/v1/inventory": ("",),
    "api/v1/inventory/nodes": ("software=driver",),
    "health/entries": ("", "state=cleared", "node=dgx-01"),
    "racks": ("",),
    "nodes": ("",),
    "disk": ("",),
    "reliability": ("", "days=365&by=node", "days=90&by=week"),
    "waste": ("", "days=90", "by=job&days=90", "by=job&sort=-held"),
    "submit": ("",),
    "catalogue": ("",),
    "me/": ("",),
    "me/sent": ("", "state=sent"),
    "outbox": ("", "state=given_up"),
    "docs": ("",),
    "runbooks": ("",),
    "api/v1/me": ("",),
    "api/v1/projects": ("",),
    "api/v1/tokens": ("",),
    "api/v1/notices": ("", "unread=1"),
    "api/v1/outbox": ("", "state=given_up", "limit=200"),
    "api/v1/jobs": (
        *OF_JOBS, *BETWEEN, "limit=200", "parent=7",
        *(f"PAGE {PAGES} limit=200&sort={sort}" for sort in ("-created", "-started", "name", "owner", "state")),
    ),
    "api/v1/jobs/<int:job_id>": ("",),
    "api/v1/jobs/<int:job_id>/attempts": ("",),
    "api/v1/jobs/<int:job_id>/checkpoints": ("",),
    "api/v1/jobs/<int:job_id>/events": ("",),
    "api/v1/jobs/<int:job_id>/series/names": ("",),
    "api/v1/postmortems": ("limit=200", "cause=gpu.ecc"),
    "api/v1/sweeps": ("", "project=project-05", "owner=person-40", "owner=nobody", "PAGE 50 limit=100"),
    "api/v1/sweeps/<int:sweep_id>": ("",),
    "api/v1/projects/disk": ("",),
    "api/v1/nodes": ("",),
    "api/v1/partitions": ("",),
    "api/v1/qos": ("",),
    "api/v1/reservations": ("",),
    "api/v1/licenses": ("",),
    "api/v1/accounts": ("",),
    "api/v1/queue": ("", "q=lora"),
    "api/v1/racks": ("",),
    "api/v1/gpus": ("", "limit=200"),
    "api/v1/agents": ("",),
    "api/v1/drains": ("", "limit=200"),
    "api/v1/health": ("", "state=cleared", "severity=fatal&limit=200"),
    "api/v1/catalogue/entries": ("",),
    "api/v1/catalogue/examples": ("",),
    "api/v1/reliability": ("days=365&by=node", "days=90&by=project"),
    "api/v1/reliability/forecast": ("nodes=64&days=14",),
    "api/v1/reliability.csv": ("by=node",),
    "api/v1/waste": ("by=person&days=90", "by=job&days=90&limit=200"),
    "api/v1/waste.csv": ("by=job",),
    "admin/": ("",),
}  # fmt: skip
RECORDS: dict[str, tuple[str, ...]] = {
    "admin/jobs/job/": ("q=lora", "q=lora-large-12", "project__id__exact=1", "p=100", "o=-1"),
    "admin/jobs/attempt/": ("q=777", "state__exact=failed", "state__exact=boot_fail", "state__exact=running", "p=100"),
    "admin/jobs/checkpoint/": ("q=lora", "state__exact=verified", "state__exact=corrupt", "p=100"),
    "admin/portal/auditentry/": ("q=person-01", "p=20"),
    "admin/portal/token/": ("q=person-01",),
}
# Those that look at no rows that a history adds to.
STILL = {
    "seen", "theme", "jobs/cancel", "submit/sync", "me/tokens/", "channels/new",
    "api/v1/jobs/check", "api/v1/jobs/attach",
    "agents/secret", "api/v1/agents/secret", "racks/all", "racks/one",
    "drains/return", "drains/several", "drains/spares", "api/v1/spares",
    "api/v1/drains/preview", "api/v1/drains/return", "api/v1/drains/return/preview",
    "health/rules", "health/breaker", "api/v1/health/rules", "api/v1/health/breaker",
    "api/v1/health/breaker/reset", "health/rules/new", "health/policies", "api/v1/health/rules/try", "api/v1/policies",
    "api/v1/racks/temperatures",
    "acceptances/start", "burnins/start", "burnins/golden",
    "api/v1/burnins/golden",
    "api/v1/burnins/golden/reset", "gameday/start",
    "catalogue/new", "catalogue/check", "catalogue/take", "api/v1/catalogue/check", "api/v1/catalogue/replays",
    "api/v1/spec/schema", "api/v1/scheduler/wake", "api/openapi.json", "api/docs", "api/", "favicon.ico", "healthz",
    "readyz", "metrics",
    "accounts/login/", "accounts/logout/", "accounts/inactive/", "accounts/signup/", "accounts/reauthenticate/",
    "accounts/password/change/", "accounts/password/new/", "accounts/password/set/",
}  # fmt: skip


def requests_by_route() -> dict[str, tuple[str, ...]]:
    """Return the queries of each route: those of REQUESTS, and every list of records."""
    records = {route: ("", *RECORDS.get(route, ())) for route, name in routes() if name.endswith("_changelist")}
    return {**REQUESTS, **records}


def routes() -> Iterator[tuple[str, str]]:
    """Yield every route of the site with its name."""
    yield from _below(get_resolver(), "")


def _below(resolver: URLResolver, before: str) -> Iterator[tuple[str, str]]:
    for pattern in resolver.url_patterns:
        route = before + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from _below(pattern, route)
        else:
            yield route, pattern.name or ""


def lead_elsewhere() -> set[str]:
    """Return the addresses that only redirect."""
    from portal.http import signposts

    return {str(pattern.pattern) for pattern in signposts.urlpatterns}


def filled(route: str, things: dict[str, Any]) -> str:
    """Return the route's address with an existing object in each placeholder."""
    for place, thing in things.items():
        route = route.replace(place, str(thing))
    return f"/{route}"
