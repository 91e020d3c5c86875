"""The page of racks: which node stands where; sysadmins say it node by node, or all at once by CSV."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from console.pages.cluster import sysadmin_of
from nodes.cluster import racks
from nodes.cluster.racks import natural
from nodes.models import Agent, Node, RackPlace
from portal.access import CLUSTER, can, user_of
from vigil_core import formatting
from vigil_core.untrusted import plain

CSV = "text/csv; charset=utf-8"


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    if request.GET.get("format") == "csv":
        answer = HttpResponse(racks.as_csv(RackPlace.objects.all()), content_type=CSV)
        answer.headers["Content-Disposition"] = 'attachment; filename="racks.csv"'
        return answer
    return _page(request)


@login_required
@require_POST
def replace(request: HttpRequest) -> HttpResponse:
    """All places at once, by a file or as text; a mistake changes nothing, and each is named by its line."""
    user = sysadmin_of(request, "say where nodes stand")
    text, problem = _given(request)
    if problem:
        return _page(request, text=text, mistakes=[problem])
    try:
        places = racks.of_csv(text)
    except racks.WrongPlaces as error:
        return _page(request, text=text, mistakes=[f"Line {one.line}: {one.message}" for one in error.mistakes])
    changed = racks.replace(user, places)
    said = f"{formatting.plural(changed, 'place')} changed" if changed else "Nothing changed"
    messages.success(request, f"{said}: {formatting.plural(len(places), 'node')} in racks.")
    return redirect("racks")


@login_required
@require_POST
def put(request: HttpRequest) -> HttpResponse:
    """One node's place; without a rack it stands in none."""
    user = sysadmin_of(request, "say where nodes stand")
    node, rack, slot = (plain(request.POST.get(name, "")).strip()[:300] for name in ("node", "rack", "slot"))
    if not rack:
        if not racks.take_out(user, node):
            messages.error(request, f"{node[:60] or 'No node'} stands in no rack.")
        return redirect("racks")
    try:
        racks.put(user, node, rack, slot)
    except racks.WrongPlaces as error:
        messages.error(request, f"Not written: {error.mistakes[0].message}")
    return redirect("racks")


def _page(request: HttpRequest, *, text: str = "", mistakes: list[str] | None = None) -> HttpResponse:
    rows = list(RackPlace.objects.all())
    known = set(Node.objects.values_list("name", flat=True)) | set(Agent.objects.values_list("node", flat=True))
    placed = {row.node for row in rows}
    free = sorted(known - placed, key=natural)
    context = {
        "section": "cluster",
        "place": "racks",
        "say": _say(len(rows), len({row.rack for row in rows}), len(free), len(placed - known)),
        "groups": _by_rack(rows),
        "known": known,
        "free": free[:1_000],
        "racks": sorted({row.rack for row in rows}, key=natural),
        "may_change": can(user_of(request), "change", CLUSTER),
        "text": text,
        "mistakes": mistakes or [],
        "most": racks.MOST,
    }
    return render(request, "nodes/racks.html", context, status=422 if mistakes else 200)


def _by_rack(rows: list[RackPlace]) -> list[tuple[str, list[RackPlace]]]:
    groups: dict[str, list[RackPlace]] = {}
    for row in rows:
        groups.setdefault(row.rack, []).append(row)
    key: Callable[[str], object] = lambda rack: (groups[rack][0].order, natural(rack))  # noqa: E731
    return [(rack, groups[rack]) for rack in sorted(groups, key=key)]  # type: ignore[arg-type]


def _say(placed: int, in_racks: int, free: int, strange: int) -> tuple[str, str]:
    if not placed:
        return "No node has a place yet.", "Until they have, the map shows them by partition."
    lead = f"{formatting.plural(placed, 'node')} in {formatting.plural(in_racks, 'rack')}."
    more = [f"{formatting.plural(free, 'node stands', 'nodes stand')} in none."] if free else []
    if strange:
        more.append(f"{formatting.plural(strange, 'name is', 'names are')} of no machine that anybody knows.")
    return lead, " ".join(more)


def _given(request: HttpRequest) -> tuple[str, str]:
    """The text that was sent, and what is wrong with it as a whole."""
    sent = request.FILES.get("file")
    if sent is None:
        text = request.POST.get("text", "")
        return text, "" if text.strip() else "There is nothing in it. Choose a file, or write lines."
    if isinstance(sent, list) or (sent.size or 0) > racks.MOST_BYTES:
        return "", f"The file is larger than {racks.MOST_BYTES:,} bytes."
    try:
        return sent.read().decode("utf-8-sig"), ""
    except UnicodeDecodeError:
        return "", "The file is no UTF-8 text. Save it as CSV in UTF-8."
