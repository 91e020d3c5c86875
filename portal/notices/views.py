"""Render the pages of channels and messages: a person's own, and everybody's for sysadmins."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from portal.access import user_of
from portal.http.paging import BadCursor, SortOrder, page
from portal.models import Channel, Delivery, Project, User
from portal.notices import channels
from portal.notices.forms import ChannelForm
from portal.outbox.kinds import KINDS
from portal.sending import mail, webhook

NEWEST = SortOrder("id", descending=True)
ROWS = 50


@sensitive_post_parameters("address")
@login_required
@require_http_methods(["GET", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    """Show or save the form of a new channel: ?kind=email|slack|webhook, and &project=… for a project's."""
    user, kind = user_of(request), request.GET.get("kind", "")
    if kind not in Channel.Kind.values:
        raise Http404
    project = _project(user, request.GET.get("project", ""))
    start = {"kinds": [kind.code for kind in KINDS]}
    initial = {**start, "time_zone": _zone(user), "address": user.email if kind == "email" and not project else ""}
    form = _form(user, kind, request, project, initial=initial)
    if request.method == "POST" and form.is_valid():
        try:
            channel = channels.make(user, project, kind, form.fields_of())
        except channels.TooManyChannels as error:
            form.add_error(None, str(error))
        else:
            if kind == Channel.Kind.WEBHOOK:
                return _page(request, channel, _form(user, kind, None, project, channel), made=True)
            messages.success(request, "Channel added. Send a test to check that it arrives.")
            return redirect("channel", channel.pk)
    context = {"form": form, "kind": kind, "project": project, "title": Channel.Kind(kind).label}
    return render(request, "portal/channel.html", {**_frame(), **context}, status=422 if form.errors else 200)


@sensitive_post_parameters("address")
@login_required
@require_http_methods(["GET", "POST"])
def channel_page(request: HttpRequest, channel_id: int) -> HttpResponse:
    user = user_of(request)
    channel = _channel(user, channel_id)
    form = _form(user, channel.kind, request, channel.project, channel, initial=ChannelForm.initial_of(channel))
    if request.method == "POST" and form.is_valid():
        channels.change(user, channel, form.fields_of())
        messages.success(request, "Saved.")
        return redirect("channel", channel.pk)
    return _page(request, channel, form, status=422 if form.errors else 200)


@login_required
@require_POST
def send_test(request: HttpRequest, channel_id: int) -> HttpResponse:
    channel = _channel(user_of(request), channel_id)
    if channel.is_paused:
        messages.warning(request, "This channel is paused: nothing is sent to it. Resume it first.")
    else:
        channels.send_test(user_of(request), channel)
        messages.success(request, "A test is being sent. The result appears below within seconds.")
    return redirect("channel", channel.pk)


@login_required
@require_POST
def new_secret(request: HttpRequest, channel_id: int) -> HttpResponse:
    """Respond with the page itself: the secret is shown only this once."""
    user = user_of(request)
    channel = _channel(user, channel_id)
    if channel.kind != Channel.Kind.WEBHOOK:
        raise Http404
    channels.renew_secret(user, channel)
    form = _form(user, channel.kind, None, channel.project, channel)
    return _page(request, channel, form, made=True)


@login_required
@require_POST
def remove(request: HttpRequest, channel_id: int) -> HttpResponse:
    user = user_of(request)
    channels.remove(user, _channel(user, channel_id))
    messages.success(request, "Channel removed.")
    return redirect("me")


@login_required
@require_safe
def sent(request: HttpRequest) -> HttpResponse:
    """Show messages to the person's own channels and to those of projects that they lead, sent or not."""
    rows = Delivery.objects.filter(channel__in=Channel.objects.visible_to(user_of(request)).values("pk"))
    return _deliveries(request, rows, is_outbox=False)


@login_required
@require_safe
def outbox(request: HttpRequest) -> HttpResponse:
    """Show everybody's messages to sysadmins."""
    user = user_of(request)
    if not user.is_sysadmin:
        raise PermissionDenied("Only sysadmins can see this. Your own messages are at /me/sent.")
    return _deliveries(request, Delivery.objects.visible_to(user), is_outbox=True)


@login_required
@require_POST
def resend(request: HttpRequest, delivery_id: int) -> HttpResponse:
    delivery = get_object_or_404(Delivery.objects.visible_to(user_of(request)), pk=delivery_id)
    try:
        channels.resend(delivery)
    except channels.NotSent as error:
        messages.warning(request, str(error))
    else:
        messages.success(request, "It will be sent again within seconds.")
    return _back(request, delivery)


@login_required
@require_POST
def give_up(request: HttpRequest, delivery_id: int) -> HttpResponse:
    user = user_of(request)
    delivery = get_object_or_404(Delivery.objects.visible_to(user), pk=delivery_id)
    if channels.give_up(delivery, user.username):
        messages.success(request, "Given up: it will not be sent.")
    return _back(request, delivery)


def _back(request: HttpRequest, delivery: Delivery) -> HttpResponse:
    return redirect("outbox" if request.POST.get("from") == "outbox" and user_of(request).is_sysadmin else "sent")


def _deliveries(request: HttpRequest, rows: Any, *, is_outbox: bool) -> HttpResponse:
    state = request.GET.get("state", "")
    if state in Delivery.State.values:
        rows = rows.filter(state=state)
    rows = rows.select_related("channel__user", "channel__project")
    try:
        found = page(rows, NEWEST, cursor=request.GET.get("after"), limit=ROWS)
    except BadCursor:
        return redirect(request.path)
    context = {
        "section": "person",
        "is_outbox": is_outbox,
        "items": found.items,
        "next": found.next,
        "is_first": not request.GET.get("after"),
        "state": state,
        "states": Delivery.State.choices,
        "unsent": rows.model.objects.unsent().count() if is_outbox else None,
    }
    return render(request, "portal/outbox.html", context)


def _channel(user: User, channel_id: int) -> Channel:
    rows = Channel.objects.visible_to(user).select_related("project", "user")
    return get_object_or_404(rows, pk=channel_id)


def _project(user: User, slug: str) -> Project | None:
    if not slug:
        return None
    project = get_object_or_404(Project.objects.visible_to(user), slug=slug)
    if not channels.may_make(user, project):
        raise PermissionDenied(f"Only leads of {slug} can change this. Ask one of them.")
    return project


def _zone(user: User) -> str:
    """Return the time zone of the person's newest channel, or else the site's."""
    last = Channel.objects.filter(user=user).order_by("-id").values_list("time_zone", flat=True).first()
    return last or settings.TIME_ZONE


def _form(
    user: User, kind: str, request: HttpRequest | None, project: Project | None, channel: Channel | None = None,
    initial: dict[str, Any] | None = None,
) -> ChannelForm:  # fmt: skip
    posted = request.POST if request is not None and request.method == "POST" else None
    if initial is None and channel is not None:
        initial = ChannelForm.initial_of(channel)
    stored_address = channel.address if channel is not None and channel.kind != Channel.Kind.EMAIL else ""
    return ChannelForm(
        kind,
        posted,
        is_sysadmin=user.is_sysadmin,
        of_project=project is not None,
        stored_address=stored_address,
        initial=initial,
    )


def _frame() -> dict[str, object]:
    return {"section": "person", "has_mail": mail.is_set_up()}


def _page(
    request: HttpRequest, channel: Channel, form: ChannelForm, *, status: int = 200, made: bool = False
) -> HttpResponse:
    context = {
        **_frame(),
        "channel": channel,
        "form": form,
        "kind": channel.kind,
        "project": channel.project,
        "title": Channel.Kind(channel.kind).label,
        "items": list(channel.deliveries.select_related("channel__user", "channel__project").order_by("-id")[:10]),
        "secret": webhook.secret_of(channel) if made else "",
    }
    return render(request, "portal/channel.html", context, status=status)
