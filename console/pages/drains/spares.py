"""Add and remove hot spares on /drains."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_http_methods, require_POST

from console.pages.drains import page as drains
from nodes.drains import spares
from nodes.models import HotSpare, Node
from portal.access import sysadmin_of
from vigil_core.untrusted import plain


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def add(request: HttpRequest) -> HttpResponse:
    """Add a hot spare. A form with a mistake is shown again."""
    user = sysadmin_of(request, "change hot spares")
    if request.method != "POST":  # the page of a refused form refreshes itself, and may be loaded again
        return redirect("drains")
    name, partition = (plain(request.POST.get(field, "")).strip()[:255] for field in ("node", "partition"))
    node = Node.objects.reported().filter(name=name).first()
    if node is None:
        mistake = f"The scheduler does not know {name[:80] or 'a node without a name'}."
        return drains.page(request, spare=(name, partition), spare_mistake=mistake)
    try:
        spares.add(user, node, partition)
    except spares.NotSuitable as error:
        return drains.page(request, spare=(name, partition), spare_mistake=str(error))
    return redirect("drains")


@login_required
@require_POST
def remove(request: HttpRequest, name: str) -> HttpResponse:
    user = sysadmin_of(request, "change hot spares")
    try:
        spares.remove(user, get_object_or_404(HotSpare, node=plain(name)))
    except spares.NotSuitable as error:
        messages.error(request, str(error))
    return redirect("drains")
