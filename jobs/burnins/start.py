"""Start and cancel burn-ins. No scheduler is called here: the follower carries out what is stored (advance.py)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from django.db import IntegrityError, transaction
from django.db.models import Count
from django.utils import timezone

from jobs.errors import Conflict, JobError
from jobs.queueing import queue
from nodes.burnin import plan
from nodes.cluster import drain
from nodes.models import BurnIn, BurnInNode, Gpu, HealthEntry, MaintenanceWindow, Node, NodeOrder
from nodes.scheduling import node_states
from portal.access import note
from portal.audit import Change
from portal.models import User
from vigil_core import formatting


class CannotBurnIn(JobError):
    """Raised if the request names no nodes, unknown ones, or too many; the message says what to do."""


class NeedsAgreement(Conflict):
    """Raised if somebody drained a node, and the request does not agree that it may return to service."""


def start(
    user: User, names: Sequence[str], seconds: int, *, may_undrain: bool = False, all_gpus: bool = False
) -> BurnIn:
    """Store a burn-in of these nodes.

    Raises CannotBurnIn, NeedsAgreement, or Conflict if one is in maintenance or being tested already.

    `may_undrain`: the sysadmin agrees that nodes which a person drained return to service if they pass. `all_gpus`: the
    tests must find all GPUs that agents list, though the scheduler may list fewer.
    """
    names = list(dict.fromkeys(names))
    nodes = _nodes(names)
    _check_seconds(seconds)
    if in_maintenance := maintenance_text(names):
        raise Conflict(f"Not started: {in_maintenance} Test it afterwards, or end the window first.")
    of_persons = [node for node in nodes if is_drained_by_person(node)]
    if of_persons and not may_undrain:
        raise NeedsAgreement(_drained_text(of_persons))
    gpus = _expected_gpus(nodes, all_gpus=all_gpus)
    try:
        with transaction.atomic():
            burn_in = BurnIn.objects.create(
                key=f"burnin{secrets.token_hex(8)}", seconds=seconds, may_undrain=may_undrain, started_by=user
            )
            BurnInNode.objects.bulk_create(
                BurnInNode(
                    burn_in=burn_in, node=node.name, gpus=gpus[node.name], was_drained=node.is_drained,
                    earlier_reason=node.reason if node.is_drained else "",
                    was_drained_by_person=node in of_persons,
                )
                for node in nodes
            )  # fmt: skip
            about = {"nodes": names, "seconds": seconds, "may_undrain": may_undrain}
            note(user, "burnin.started", burn_in, change=Change(after=about))
            transaction.on_commit(lambda: queue("jobs.tasks.follow"))
    except IntegrityError:
        raise Conflict(_busy_text(names)) from None
    return burn_in


def cancel(user: User, burn_in: BurnIn) -> None:
    """Request the end; nodes that were drained before are drained again. Raises Conflict if no tests are left."""
    rows = BurnIn.objects.with_tests_left().filter(pk=burn_in.pk)
    with transaction.atomic():
        if rows.filter(cancel_requested_at=None).update(cancel_requested_at=timezone.now(), cancel_requested_by=user):
            note(user, "burnin.cancelled", burn_in)
            transaction.on_commit(lambda: queue("jobs.tasks.follow"))
        elif not rows.exists():
            is_active = BurnIn.objects.active().filter(pk=burn_in.pk).exists()
            why = "has no tests left to stop; it returns its nodes" if is_active else "has ended"
            raise Conflict(f"Not cancelled. Burn-in {burn_in.pk} {why}.")


def maintenance_text(names: Sequence[str]) -> str:
    """Return which of the nodes is in maintenance, and until when; "" if none is."""
    ends = MaintenanceWindow.ends_by_node(timezone.now())
    node = next((name for name in names if name in ends), None)
    return "" if node is None else f"{node} is in maintenance until {formatting.clock(ends[node])}."


def _expected_gpus(nodes: Sequence[Node], *, all_gpus: bool) -> dict[str, int]:
    """Return by node how many GPUs the tests must find: what the scheduler allocates there.

    With `all_gpus`, or if something was found about one of its GPUs, they must find all that its agent lists: a GPU
    that the scheduler has taken away since was not tested, and must not count as repaired.
    """
    names = {node.name for node in nodes}
    if not all_gpus:
        entries = HealthEntry.objects.active().filter(node__in=names, gpu__isnull=False)
        names = set(entries.order_by().values_list("node", flat=True))
    gpus = Gpu.objects.filter(agent__node__in=names, gone_at=None).order_by()
    listed = dict(gpus.values_list("agent__node").annotate(Count("pk")))
    return {node.name: max(node.gpus, listed.get(node.name, 0)) for node in nodes}


def is_drained_by_person(node: Node) -> bool:
    """Return whether the node is drained by a person or a site's program: not by Vigil, nor for an approved finding.

    A burn-in that drains again what a person had drained before leaves it the person's drain.
    """
    if not node.is_drained:
        return False
    last = NodeOrder.objects.filter(node=node.name, state=NodeOrder.State.DONE).select_related("asked_by").first()
    return was_drained_outside_vigil_rules(node, last) or (
        BurnInNode.objects.filter(return_order=last, was_drained_by_person=True).exists()
    )


def was_drained_outside_vigil_rules(node: Node, last_order: NodeOrder | None) -> bool:
    """Return whether a person, or a program outside Vigil, drained the node.

    Then the last order carried out does not explain the drain, or neither a rule nor a finding caused that order.
    Whoever approved a finding's order agreed to what the rule proposed, and so to its end.
    """
    if last_order is None or not drain.is_reason_of(last_order, node):
        return True
    return not (last_order.rule or last_order.is_for_finding)


def _nodes(names: Sequence[str]) -> list[Node]:
    if not names:
        raise CannotBurnIn("No node was named. Name at least one.")
    if len(names) > plan.MAX_NODES:
        raise CannotBurnIn(f"{len(names):,} nodes are too many for one burn-in: name {plan.MAX_NODES} at most.")
    by_name = {node.name: node for node in Node.objects.reported().filter(name__in=names)}
    if missing := [name for name in names if name not in by_name]:
        raise CannotBurnIn(f"The scheduler does not know {formatting.listed(missing[:8])}. `vigil nodes` lists nodes.")
    down = [name for name in names if "down" in node_states.state_words(by_name[name].state)]
    if down:
        they_are, them = ("it is", "it") if len(down) == 1 else ("they are", "them")
        raise CannotBurnIn(
            f"{formatting.listed(down[:8])} cannot be tested while {they_are} down. Repair and boot {them} first."
        )
    if sliced := _with_mig(names):
        raise CannotBurnIn(
            f"The GPUs of {formatting.listed(sliced[:8])} are cut into MIG slices, of which only one could be tested."
            " Turn MIG off for a burn-in (nvidia-smi -mig 0)."
        )
    return [by_name[name] for name in names]


def _with_mig(names: Sequence[str]) -> list[str]:
    """Return the nodes that have a GPU in MIG mode, as their agents report."""
    gpus = Gpu.objects.filter(agent__node__in=names, gone_at=None, has_mig=True)
    return sorted(set(gpus.order_by().values_list("agent__node", flat=True)))


def _check_seconds(seconds: int) -> None:
    if not plan.MIN_SECONDS <= seconds <= plan.MAX_SECONDS:
        raise CannotBurnIn(f"{seconds:,} s: a burn-in lasts from 1 minute to 48 hours.")


def _drained_text(nodes: Sequence[Node]) -> str:
    (first, *others) = nodes
    count = formatting.plural(len(others), "other node")
    more = f" {count} {'is' if len(others) == 1 else 'are'} drained, too." if others else ""
    return f"{drain.DrainedByAnother(first)}{more} Nodes that pass will return to service."


def _busy_text(names: Sequence[str]) -> str:
    busy = BurnInNode.objects.filter(is_active=True, node__in=names).order_by("node").first()
    if busy is None:
        return "Not started: another burn-in of these nodes was just started or ended. Try again."
    return f"Not started: {busy.node} is being tested by burn-in {busy.burn_in_id}. Wait for it or cancel it."
