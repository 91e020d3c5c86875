"""The map of the cluster: racks, nodes and GPUs by state, utilisation, temperature or owner; and a card of one GPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib.auth.decorators import login_required
from django.db.models import F, Sum
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_safe

from console.pages.cluster_map import layout, words
from console.pages.cluster_map.packed import packed
from console.pages.cluster_map.rows import machines
from console.pages.freshness import stale_text
from console.pages.requests import is_fragment, vary_on_fragment
from jobs.api.telemetry.machines import gpu_shapes
from jobs.listing import visibility
from nodes.models import Agent, Gpu, Partition, Reading
from nodes.telemetry import mounts
from portal.access import user_of
from portal.models import User
from vigil_core.untrusted import plain

VIEWS = (("state", "State"), ("use", "Utilisation"), ("heat", "Temperature"), ("owner", "Owner"))
SLOW_WINDOW = timedelta(days=1)  # how long a slow file system stays on the page
MAX_OWNERS = 12  # listed in the legend


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    user, now = user_of(request), timezone.now()
    nodes = machines(user, now)
    partitions = list(Partition.objects.values_list("name", flat=True))
    full_map = layout.draw(nodes, partitions)
    slow, waiting = mounts.between(now - SLOW_WINDOW, now, now=now), _waiting(user)
    rack = plain(request.GET.get("rack", ""))[:64]
    shown = layout.draw_rack(full_map, rack) if rack else full_map
    context = {
        "section": "cluster",
        "place": "map",
        "fragment": is_fragment(request),
        "now": now,
        "stale": stale_text(Reading.Part.NODES, now),
        "headline": words.headline(full_map, slow, waiting, now),
        "facts": [(*fact, _address(where)) for *fact, where in words.facts(full_map, waiting)],
        "nodes": len(nodes),
        "gpus": full_map.gpus,
        "map": shown,
        "packed": packed(shown) if shown.size == "canvas" else None,
        "rack": rack,
        "by": _chosen_view(request),
        "choices": VIEWS,
        "owners": shown.owners[:MAX_OWNERS],
        "more_owners": len(shown.owners) - MAX_OWNERS,
        "slow": [(event, event.text(now)) for event in slow],
        "ramp": range(9),
        "heat": (layout.LOW_C, layout.HIGH_C),
        "read": Reading.objects.filter(part=Reading.Part.NODES).values_list("read_at", flat=True).first(),
    }
    template = "nodes/_cluster.html" if is_fragment(request) else "nodes/cluster.html"
    return vary_on_fragment(render(request, template, context))


@login_required
@require_safe
def gpu(request: HttpRequest, name: str, index: int) -> HttpResponse:
    """Show a card with what is known about one GPU."""
    user, now = user_of(request), timezone.now()
    found = next(iter(machines(user, now, names=[plain(name)])), None)
    device = next((device for device in found.devices if device.index == index), None) if found else None
    if found is None or device is None:
        raise Http404(f"There is no GPU {index} on {name}.")
    cell = layout.cell_of(device, found)
    context = {
        "node": found,
        "cell": cell,
        "word": layout.WORDS[cell.state],
        "reported": _agent_values(user, found.name, device.pk),
    }
    return render(request, "nodes/_gpu_card.html", context)


def _agent_values(user: User, node: str, gpu_id: int | None) -> dict[str, Any] | None:
    """Return what the agent reports of the GPU, as this person may see it."""
    agent = Agent.objects.filter(node=node).first()
    uuid = Gpu.objects.filter(pk=gpu_id).values_list("uuid", flat=True).first() if gpu_id else None
    if agent is None or uuid is None:
        return None
    return next((shape for shape in gpu_shapes(user, agent) if shape["uuid"] == uuid), None)


def _waiting(user: User) -> words.PendingDemand:
    rows = visibility.visible_queue(user).filter(state="pending").order_by()
    totals = rows.aggregate(jobs=Sum("tasks"), gpus=Sum(F("gpus") * F("tasks")))
    return words.PendingDemand(totals["jobs"] or 0, totals["gpus"] or 0)


def _chosen_view(request: HttpRequest) -> str:
    view = request.GET.get("by", "")
    return view if view in dict(VIEWS) else VIEWS[0][0]


def _address(where: str) -> str:
    """Return the page that a number links to."""
    if where in {"running", "pending"}:
        return f"{reverse('queue')}?state={where}"
    return f"{reverse('nodes')}?state=out" if where == "out" else ""
