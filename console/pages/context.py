"""Provide what every page's frame needs: the theme, the time zone, and what the navigation shows to whom."""

from __future__ import annotations

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.functional import SimpleLazyObject
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST

from portal.announcements.current import current
from portal.models import User

THEMES = {"light", "dark"}
YEAR_S = 365 * 86400


def context(request: HttpRequest) -> dict[str, object]:
    """Return template variables for every page. Queries only run where a page uses their result."""
    theme = request.COOKIES.get("theme")
    return {
        "theme": theme if theme in THEMES else None,
        "site_zone": timezone.get_current_timezone_name(),
        "active_jobs": SimpleLazyObject(lambda: _active_jobs(request)),
        "waiting_decisions": SimpleLazyObject(lambda: _waiting_decisions(request)),
        "announcements": SimpleLazyObject(current),
        "sees_disk": SimpleLazyObject(lambda: _sees_disk(request)),
    }


def _active_jobs(request: HttpRequest) -> int:
    """Return how many jobs that this person may see are pending or running."""
    from jobs.models import Attempt, Job

    if not isinstance(request.user, User):
        return 0
    return Job.objects.visible_to(request.user).filter(latest__state__in=Attempt.ALIVE).count()


def _waiting_decisions(request: HttpRequest) -> int:
    """Return how many findings wait for this sysadmin's decision; 0 for everybody else."""
    from nodes.models import HealthEntry

    if not isinstance(request.user, User) or not request.user.is_sysadmin:
        return 0
    return HealthEntry.objects.waiting().count()


def _sees_disk(request: HttpRequest) -> bool:
    """Return whether this person may see the page about disk use."""
    from jobs.disk import usage

    return isinstance(request.user, User) and usage.may_see(request.user)


@require_POST
def theme(request: HttpRequest) -> HttpResponse:
    """Remember light or dark in a cookie, so that the next page is served in it; any other value follows the system."""
    back = request.META.get("HTTP_REFERER", "")
    if not url_has_allowed_host_and_scheme(back, {request.get_host()}, require_https=request.is_secure()):
        back = "/"
    response = HttpResponseRedirect(back)
    wanted = request.POST.get("theme")
    if wanted in THEMES:
        response.set_cookie("theme", wanted, max_age=YEAR_S, samesite="Lax", secure=settings.SESSION_COOKIE_SECURE)
    else:
        response.delete_cookie("theme", samesite="Lax")
    return response
