"""Render the page of one node: the scheduler's and the agent's view of it; draining and notes for sysadmins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from console.pages import forms
from console.pages.freshness import stale_text
from console.pages.health.page import EntryRow
from console.pages.nodes import facts
from console.pages.nodes.facts import MachineView
from console.pages.nodes.page import NodeRow
from console.pages.requests import is_fragment, vary_on_fragment
from jobs.listing import visibility
from nodes.cluster import drain as orders
from nodes.models import Agent, MaintenanceWindow, Node, NodeNote, NodeOrder, Reading
from nodes.monitoring.site_rules import rules_in_force
from nodes.presenting import machine
from nodes.presenting.counters import attention_text
from nodes.remediation.entry_lists import active_of_node
from nodes.telemetry import mounts
from nodes.telemetry.mounts import SlowFileSystem
from portal.access import CLUSTER, can, note, sees_all, sysadmin_of, user_of
from portal.audit import Change
from portal.models import User
from vigil_core import formatting
from vigil_core.formatting import NBSP
from vigil_core.untrusted import plain

Fact = tuple[str, str, str]
MAX_SLOW = 5
MAX_FINDINGS = 5
NOTHING = "nothing"
SHOWN_NOTES = 50


@login_required
@require_safe
def node_page(request: HttpRequest, name: str) -> HttpResponse:
    """Show a node that the scheduler knows, an agent reports on, or both."""
    user, now = user_of(request), timezone.now()
    name = plain(name)
    node, agent = Node.objects.filter(name=name).first(), Agent.objects.filter(node=name).first()
    if node is None and agent is None:
        raise Http404(f"There is no node {name}.")
    span = facts.span_of(request.GET.dict(), now)
    shown = MachineView(user, node, agent, span, now) if agent is not None else None
    if is_fragment(request) and request.headers.get("X-Page-GPUs", NOTHING) != _gpu_keys(shown):
        return HttpResponse(status=204, headers={"HX-Refresh": "true"})
    context = {
        "section": "nodes",
        "name": name,
        "node": node,
        "agent": agent,
        "fragment": is_fragment(request),
        "stale": stale_text(Reading.Part.NODES, now) if node is not None else "",
        "headline": machine.lead_text(_sentence_facts(node, shown, now)),
        "may_change": can(user, "change", CLUSTER),
        "may_drain": node is not None and not node.is_made_up and can(user, "change", CLUSTER),
        "drained_by_another": node is not None and orders.is_drained_by_another(node, user),
        "most_reason": orders.MAX_REASON,
        "maintenance": _maintenance(name),
        **_findings(name, user),
        "notes": NodeNote.objects.filter(node=name).select_related("by")[:SHOWN_NOTES],
        "most_note": NodeNote.MOST,
        "facts": [*_facts(node, shown)],
        **(_scheduler_context(user, node) if node is not None else {}),
        **(_agent_context(shown, is_fragment=is_fragment(request)) if shown is not None else {}),
    }
    return vary_on_fragment(render(request, "nodes/_node.html" if is_fragment(request) else "nodes/node.html", context))


def _findings(name: str, user: User) -> dict[str, Any]:
    """Return the node's most urgent active findings, and how many it has."""
    found = active_of_node(name)
    entries = list(found[:MAX_FINDINGS])
    if not entries:
        return {}
    rules, shows_text = rules_in_force(), sees_all(user)
    rows = [EntryRow(entry, rules.get(entry.rule), shows_kernel_text=shows_text) for entry in entries]
    return {"findings": rows, "findings_count": found.count()}


def _maintenance(name: str) -> list[MaintenanceWindow]:
    """Return the node's maintenance that is planned or has begun; there are at most a hundred windows."""
    rows = MaintenanceWindow.objects.unfinished().order_by("starts_at")
    return [window for window in rows if name in window.nodes][:3]


def _gpu_keys(shown: MachineView | None) -> str:
    """Return which GPUs the page has rows for; if they change, it must be rendered again."""
    return NOTHING if shown is None else ",".join(["gpus", *(str(gpu.pk) for gpu in shown.gpus)])


def _sentence_facts(node: Node | None, shown: MachineView | None, now: Any) -> machine.NodeHeadline:
    if shown is not None:
        return facts.facts_of(shown)
    return machine.NodeHeadline(now=now, **(facts.scheduler_facts(node) if node is not None else {}))


def _scheduler_context(user: User, node: Node) -> dict[str, Any]:
    return {
        "shown": NodeRow(node, visibility.allocations_on(user, [node.name])[node.name]),
        "orders": NodeOrder.objects.filter(node=node.name).select_related("asked_by")[:5],
    }


def _slow(shown: MachineView) -> list[SlowFileSystem]:
    """Return shared file systems that were slow on this node and on others, which is a problem of the cluster."""
    start, end = shown.span.moments
    return mounts.between(start, end, node=shown.agent.node, now=shown.now)[:MAX_SLOW]


def _agent_context(shown: MachineView, *, is_fragment: bool) -> dict[str, Any]:
    visits, hidden = facts.visits(shown)
    context: dict[str, Any] = {
        "machine": shown,
        "span": shown.span,
        "ranges": facts.RANGES,
        "lanes": facts.lanes(shown),
        "marks": facts.marks(shown),
        "happened": shown.events[: facts.MAX_EVENTS],
        "slow": [(event, event.text(shown.now)) for event in _slow(shown)],
        "has_more_events": len(shown.events) > facts.MAX_EVENTS,
        "processes": facts.processes(shown),
        "counters": (rows := facts.counters(shown)),
        "counters_text": attention_text(rows, [gpu.index for gpu in shown.present_gpus if gpu.lost_at]),
        "visits": visits,
        "hidden_visits": hidden,
    }
    if is_fragment:
        return context
    figures = facts.host_figures(shown)
    charts = [chart for lane in context["lanes"] for chart in lane.charts]
    page = {
        "node": shown.agent.node,
        "now": shown.now.timestamp(),
        "zone": timezone.get_current_timezone_name(),
        "gpus": _gpu_keys(shown),
    }
    return context | {
        "figures": figures,
        "node_charts": page | {"figures": [*charts, *figures]},
        "topology": facts.topology(shown.agent),
    }


def _facts(node: Node | None, shown: MachineView | None) -> Iterator[Fact]:
    """Yield the key figures: title, value, and context."""
    if node is not None and node.gpus:
        yield "GPUs in use", formatting.count(node.gpus_used), f"of {formatting.count(node.gpus)}"
    if shown is not None:
        yield from _gpu_strip(shown)
    if node is not None:
        yield "CPUs in use", formatting.count(node.cpus_used), f"of {formatting.count(node.cpus)}"
        if node.memory_mib:
            yield "Memory allocated", *_gib(node.memory_used_mib, node.memory_mib)
    if shown is not None:
        yield from _host_strip(shown)
    elif node is not None:
        if node.load is not None:
            yield "Load", formatting.measure(node.load), ""
        if node.booted_at:
            yield "Up since", formatting.clock(node.booted_at), ""
        if node.features:
            yield "Features", "", " · ".join(node.features)


def _gpu_strip(shown: MachineView) -> Iterator[Fact]:
    """Yield totals of its GPUs, as far as this person may see each."""
    newest = [shown.newest(gpu) for gpu in shown.present_gpus]
    watts = [values["watts"] for values in newest if "watts" in values]
    caps = [gpu.power_cap_watts for gpu in shown.present_gpus if gpu.power_cap_watts and not shown.hides(gpu)]
    if watts:
        most = f"of {formatting.measure(sum(caps) / 1000)}{NBSP}kW" if len(caps) == len(watts) else ""
        yield "GPUs’ power", f"{formatting.measure(sum(watts) / 1000)}{NBSP}kW", most


def _host_strip(shown: MachineView) -> Iterator[Fact]:
    host = shown.host
    if (busy := host.get("cpu_percent")) is not None:
        yield "CPU", formatting.share(busy / 100), "busy"
    used, there = host.get("memory_used_mib"), host.get("memory_total_mib")
    if used is not None and there:
        yield "Memory", *_gib(used, there)
    if (up := host.get("uptime_s")) is not None:
        yield "Up", formatting.duration(up), ""


def _gib(used_mib: float, there_mib: float) -> tuple[str, str]:
    used, there = (formatting.count(round(mib / 1024)) for mib in (used_mib, there_mib))
    return used, f"of {there}{NBSP}GiB"


@login_required
@require_POST
def drain(request: HttpRequest, name: str) -> HttpResponse:
    try:
        reason = forms.reason(request)
    except forms.BadReason as error:
        messages.error(request, str(error))
        return redirect("node", name)
    return _place_order(request, name, NodeOrder.Action.DRAIN, reason)


@login_required
@require_POST
def undrain(request: HttpRequest, name: str) -> HttpResponse:
    return _place_order(request, name, NodeOrder.Action.UNDRAIN)


def _place_order(request: HttpRequest, name: str, action: NodeOrder.Action, reason: str = "") -> HttpResponse:
    user = sysadmin_of(request, f"{action} nodes")
    node = Node.objects.filter(name=plain(name)).first()
    if node is None:
        raise Http404(f"There is no node {name}.")
    if node.is_made_up:
        raise PermissionDenied(f"{name} is a demo node: the scheduler does not know it.")
    try:
        orders.request_order(user, node, action, reason, replaces=request.POST.get("replaces"))
    except orders.DrainedByAnother as error:
        # A drained node has no button to drain it: only the command replaces the reason.
        replace = f"To replace its reason: vigil drain {name} --reason R --replace"
        again = replace if action == NodeOrder.Action.DRAIN else "Read the reason before you undrain the node."
        messages.error(request, f"{error} Nothing was changed. {again}")
    except orders.OrderedByPerson as error:
        why = " --reason R" if action == NodeOrder.Action.DRAIN else ""
        messages.error(request, f"{error} Nothing was changed. To replace that: vigil {action} {name}{why} --replace")
    except orders.NodeGone as error:
        raise Http404(str(error)) from None
    return redirect("drains") if request.POST.get("next") == "drains" else redirect("node", name)


@login_required
@require_POST
def add_note(request: HttpRequest, name: str) -> HttpResponse:
    """Store a note about a node for everybody to read."""
    user, name = sysadmin_of(request, "write notes about nodes"), plain(name)
    if not Node.objects.filter(name=name).exists() and not Agent.objects.filter(node=name).exists():
        raise Http404(f"There is no node {name}.")
    text = plain(request.POST.get("text", "")).strip()
    if not text or len(text) > NodeNote.MOST:
        messages.error(request, f"Write a note of at most {formatting.count(NodeNote.MOST)} characters.")
        return redirect("node", name)
    NodeNote.objects.create(node=name, text=text, by=user)
    note(user, "node_note.added", name, change=Change(after={"text": text}))
    return redirect(f"{reverse('node', args=[name])}#h-notes")


@login_required
@require_POST
def remove_note(request: HttpRequest, name: str, note_id: int) -> HttpResponse:
    user = sysadmin_of(request, "remove notes about nodes")
    found = get_object_or_404(NodeNote, node=plain(name), pk=note_id)
    found.delete()
    note(user, "node_note.removed", found.node, change=Change(before={"text": found.text}))
    return redirect(f"{reverse('node', args=[found.node])}#h-notes")
