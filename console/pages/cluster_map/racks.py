"""Render the page of racks: which node is in which rack; sysadmins place nodes one by one, or all by CSV."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from console.pages.cluster_map import rack_temperatures
from nodes.cluster import racks
from nodes.cluster.racks import natural_sort_key
from nodes.models import Agent, Node, RackPlace
from portal.access import CLUSTER, can, sysadmin_of, user_of
from portal.http.download import as_download
from vigil_core import formatting
from vigil_core.untrusted import plain

CSV = "text/csv; charset=utf-8"


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    if request.GET.get("format") == "csv":
        return as_download(HttpResponse(racks.as_csv(RackPlace.objects.all()), content_type=CSV), "racks.csv")
    return _page(request)


@login_required
@require_POST
def replace(request: HttpRequest) -> HttpResponse:
    """Replace all places by a file or text; a mistake changes nothing, and each is reported with its line."""
    user = sysadmin_of(request, "place nodes in racks")
    text, problem = _uploaded_text(request)
    if problem:
        return _page(request, text=text, mistakes=[problem])
    try:
        places = racks.parse_csv(text)
    except racks.WrongPlaces as error:
        return _page(
            request, text=text, mistakes=[f"Line {mistake.line}: {mistake.message}" for mistake in error.mistakes]
        )
    changed = racks.replace(user, places)
    summary = f"{formatting.plural(changed, 'place')} changed" if changed else "Nothing changed"
    messages.success(request, f"{summary}: {formatting.plural(len(places), 'node')} in racks.")
    return redirect("racks")


@login_required
@require_POST
def put(request: HttpRequest) -> HttpResponse:
    """Place one node; without a rack it is removed from its rack."""
    user = sysadmin_of(request, "place nodes in racks")
    node, rack, slot = (plain(request.POST.get(name, "")).strip()[:300] for name in ("node", "rack", "slot"))
    if not rack:
        if not racks.remove_node(user, node):
            messages.error(request, f"{node[:60] or 'No node'} is not in a rack.")
        return redirect("racks")
    try:
        racks.place_node(user, node, rack, slot)
    except racks.WrongPlaces as error:
        return _page(request, sent=(node, rack, slot), mistake=error.mistakes[0].message)
    return redirect("racks")


def _page(
    request: HttpRequest, *, text: str = "", mistakes: list[str] | None = None,
    sent: tuple[str, str, str] = ("", "", ""), mistake: str = "",
) -> HttpResponse:  # fmt: skip
    """Return the page. `text` and `mistakes`: a refused file; `sent` and `mistake`: a refused place of one node."""
    rows = list(RackPlace.objects.all())
    node_names = set(Node.objects.values_list("name", flat=True)) | set(Agent.objects.values_list("node", flat=True))
    placed = {row.node for row in rows}
    free = sorted(node_names - placed, key=natural_sort_key)
    context = {
        "section": "cluster",
        "place": "racks",
        "headline": _headline(len(rows), len({row.rack for row in rows}), len(free), len(placed - node_names)),
        "groups": _by_rack(rows),
        "known": node_names,
        "free": free[:1_000],
        "racks": sorted({row.rack for row in rows}, key=natural_sort_key),
        "may_change": can(user_of(request), "change", CLUSTER),
        "text": text,
        "mistakes": mistakes or [],
        "sent": dict(zip(("node", "rack", "slot"), sent, strict=True)),
        "mistake": mistake,
        "most": racks.MOST,
        **rack_temperatures.context(user_of(request)),
    }
    return render(request, "nodes/racks.html", context, status=422 if mistakes or mistake else 200)


def _by_rack(rows: list[RackPlace]) -> list[tuple[str, list[RackPlace]]]:
    groups: dict[str, list[RackPlace]] = {}
    for row in rows:
        groups.setdefault(row.rack, []).append(row)
    key: Callable[[str], object] = lambda rack: (groups[rack][0].order, natural_sort_key(rack))  # noqa: E731
    return [(rack, groups[rack]) for rack in sorted(groups, key=key)]  # type: ignore[arg-type]


def _headline(placed: int, in_racks: int, free: int, strange: int) -> tuple[str, str]:
    if not placed:
        return "No nodes are placed in racks yet.", "Until then the map groups them by partition."
    lead = f"{formatting.plural(placed, 'node')} in {formatting.plural(in_racks, 'rack')}."
    more = [f"{formatting.plural(free, 'node is', 'nodes are')} in no rack."] if free else []
    if strange:
        more.append(f"{formatting.plural(strange, 'name in racks matches', 'names in racks match')} no known node.")
    return lead, " ".join(more)


def _uploaded_text(request: HttpRequest) -> tuple[str, str]:
    """Return the submitted text, and what is wrong with it as a whole."""
    sent = request.FILES.get("file")
    if sent is None:
        text = request.POST.get("text", "")
        return text, "" if text.strip() else "It is empty. Choose a file, or enter lines."
    if isinstance(sent, list) or (sent.size or 0) > racks.MAX_BYTES:
        return "", f"The file is larger than {racks.MAX_BYTES:,} bytes."
    try:
        return sent.read().decode("utf-8-sig"), ""
    except UnicodeDecodeError:
        return "", "The file is not UTF-8 text. Save it as CSV in UTF-8."
