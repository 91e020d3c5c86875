"""Render /announcements: what sysadmins announce to everybody, and since when."""

from __future__ import annotations

from datetime import datetime

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST

from console.pages import forms
from portal.access import CLUSTER, can, sysadmin_of, user_of
from portal.announcements import write
from portal.models import Announcement

MAX_PAST = 30
GLYPHS = {"info": "notice", "warning": "warn", "critical": "failed"}


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def index(request: HttpRequest) -> HttpResponse:
    """List announcements; sysadmins write them."""
    mistake = mistake_field = ""
    if request.method == "POST":
        user = sysadmin_of(request, "post announcements")
        try:
            starts_at, ends_at = (_moment(request.POST.get(name, ""), name) for name in ("starts_at", "ends_at"))
            write.announce(user, request.POST.get("text", ""), request.POST.get("level", ""), starts_at, ends_at)
        except write.BadAnnouncement as error:
            mistake, mistake_field = str(error), error.field
        else:
            messages.success(request, "Announced.")
            return redirect("announcements")
    visible = Announcement.objects.visible_to(user_of(request))
    pending = [*visible.pending().select_related("written_by").order_by("starts_at")]
    past = visible.exclude(pk__in=[row.pk for row in pending]).select_related("written_by")
    context = {
        "section": "home",
        "pending": [(row, GLYPHS[row.level]) for row in pending],
        "past": past[:MAX_PAST],
        "may_change": can(user_of(request), "change", CLUSTER),
        "levels": Announcement.Level.values,
        "most": Announcement.MAX_LENGTH,
        "mistake": mistake,
        "mistake_field": mistake_field,
        "sent": request.POST,
        "zone": timezone.get_current_timezone_name(),
    }
    return render(request, "portal/announcements.html", context, status=422 if mistake else 200)


@login_required
@require_POST
def withdraw(request: HttpRequest, announcement_id: int) -> HttpResponse:
    user = sysadmin_of(request, "withdraw announcements")
    row = get_object_or_404(Announcement, pk=announcement_id)
    if not write.withdraw(user, row):
        messages.error(request, "This announcement is over already.")
    return redirect("announcements")


def _moment(text: str, field: str) -> datetime | None:
    """Return a time as a browser sends it, in the site's time zone; None if it is empty."""
    if not text:
        return None
    try:
        return forms.moment(text)
    except ValueError:
        raise write.BadAnnouncement(field, "Enter times as 2026-12-01T08:00.") from None
