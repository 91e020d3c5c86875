"""Decide what happens about an open health entry: act, propose, or nothing.

An act writes the entry's decision, the order and the audit entry in one transaction, under the lock of the control row,
which also counts what was done in the last hour: two workers together exceed no limit, and a worker that is killed
leaves either all of it or nothing. The next tick sends the order to the scheduler, as it sends a person's
(`nodes.cluster.drain`).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from nodes.cluster import drain
from nodes.cluster.service_state import service_state
from nodes.health import limits
from nodes.health.requesters import SPARE
from nodes.health.rules.rule import OUT_OF_SERVICE
from nodes.models import HealthControl, HealthEntry, MaintenanceWindow, Node, NodeOrder
from nodes.monitoring import policies
from nodes.monitoring.evaluate import LATE
from nodes.remediation.existing_drain import existing_drain
from nodes.remediation.limits_used import automatic_drains
from nodes.remediation.reason import drain_reason
from nodes.remediation.undrained import decide_again, follow_undrains
from portal import bulk
from portal.access import note
from vigil_core import formatting

logger = logging.getLogger(__name__)

Decision = HealthEntry.EntryDecision
State = HealthEntry.EntryState
NODES_ARE_READ = timedelta(minutes=2)
"""How long after a start the nodes may still be unread."""
AT_ONCE = 500
BUDGET_S = 2.0
"""Per pass: it runs on the worker that carries out orders, which wait meanwhile."""
_BREAKER = timedelta(seconds=limits.BREAKER_S)
_UNKNOWN = "The scheduler does not know this node."
_BY_POLICY = "The policy for {} is to propose it."


def decide(now: datetime | None = None) -> None:
    """Decide about every open entry whose rule wants the node out of service; safe to run twice at once."""
    now = now or timezone.now()
    _propose_refused()
    _propose_exclusions()
    follow_undrains(now)
    decide_again(now)
    if not _undecided().exists():
        return
    trip_if_widespread(now)
    in_maintenance = MaintenanceWindow.ends_by_node(now)
    waiting: defaultdict[str, list[int]] = defaultdict(list)
    due = []
    for pk, node, held_back in _undecided().values_list("pk", "node", "held_back"):
        if node not in in_maintenance:
            due.append(pk)
        # Else it stays undecided, and is decided when the window is over.
        elif held_back != (text := f"In maintenance until {formatting.clock(in_maintenance[node])}."):
            waiting[text].append(pk)
    _decide_within_budget(due, now)
    for text, pks in waiting.items():
        for start in range(0, len(pks), AT_ONCE):
            _undecided().filter(pk__in=pks[start : start + AT_ONCE]).update(held_back=text)


def _decide_within_budget(due: Sequence[int], now: datetime) -> None:
    """Decide about entries until the budget is used up; the rest stays undecided for the next tick."""
    usage, until = _LimitUsage(now), time.monotonic() + BUDGET_S
    for number, pk in enumerate(due):
        began = time.monotonic()
        if number and began > until:
            return
        _decide(pk, now, usage)
        bulk.give_way(began)


@dataclass
class _LimitUsage:
    """The used part of the limits on automatic drains, read for one pass.

    To read all nodes for each of a thousand findings takes minutes. So what was read earlier in the pass may refuse a
    drain; none is ordered unless what is read under the lock allows it.
    """

    now: datetime
    cluster: limits.ServiceState | None = None

    def refusal(self, node: str) -> str:
        drains = automatic_drains(self.now)
        if self.cluster is not None and (refusal := self._refusal(self.cluster, drains, node)):
            return refusal
        self.cluster = service_state()
        return self._refusal(self.cluster, drains, node)

    def _refusal(self, cluster: limits.ServiceState, drains: Sequence[limits.AutomaticDrain], node: str) -> str:
        return limits.refusal(cluster, drains, node, self.now.timestamp())


def _propose_refused() -> None:
    """Let a person decide where the scheduler refused the order, or no worker carried it out in time."""
    done = (Decision.AUTOMATIC, Decision.APPROVED)
    refused = HealthEntry.objects.open().filter(decision__in=done, order__state=NodeOrder.State.REFUSED)
    if not refused.exists():
        return
    with transaction.atomic():
        HealthControl.locked()
        for entry in refused.select_related("order"):
            entry.decision, entry.decided_at = Decision.PROPOSED, None
            entry.held_back = f"Its order was refused: {entry.order.outcome}" if entry.order else ""
            entry.save(update_fields=["decision", "decided_at", "held_back"])


def _propose_exclusions() -> None:
    """Let a person decide about each node to exclude, if that is the policy."""
    if policies.modes()["exclude"] == policies.Mode.PROPOSE:
        HealthEntry.objects.open().filter(decision=Decision.NONE, action="exclude").update(
            decision=Decision.PROPOSED, held_back=_BY_POLICY.format("exclude")
        )


def _undecided() -> QuerySet[HealthEntry]:
    undecided = HealthEntry.objects.open().filter(decision=Decision.NONE, decided_at=None)
    return undecided.filter(action__in=OUT_OF_SERVICE).order_by("opened_at")


def _decide(pk: int, now: datetime, usage: _LimitUsage) -> None:
    with transaction.atomic():
        control = HealthControl.locked()
        entry = _undecided().filter(pk=pk).select_related("gpu").first()
        if entry is None:  # another worker or a person was faster
            return
        if _may_not_be_listed_yet(entry, now):
            return
        entry.held_back = _act(entry, control, now, usage)
        entry.decision = Decision.PROPOSED if entry.held_back else Decision.AUTOMATIC
        entry.decided_at = None if entry.held_back else now
        entry.save(update_fields=["decision", "decided_at", "held_back", "order"])
    logger.info("health entry %d (%s): %s. %s", pk, entry, entry.get_decision_display(), entry.held_back)


def _may_not_be_listed_yet(entry: HealthEntry, now: datetime) -> bool:
    """Return whether to wait: a portal that has just started receives errors before it has read the nodes."""
    if settings.VIGIL_HEALTH != "act" or entry.opened_at is None or entry.opened_at < now - NODES_ARE_READ:
        return False
    return not Node.objects.reported().filter(name=entry.node).exists()


def _act(entry: HealthEntry, control: HealthControl, now: datetime, usage: _LimitUsage) -> str:
    """Join the drain for another finding, or order one; return why Vigil does not act by itself, "" if it does."""
    if _join(entry, now):
        return ""
    held_back = _obstacle(entry, control, usage) or _drain(entry)
    if held_back and _withdraw_return(entry, now) and _join(entry, now):
        return ""
    return held_back


def _join(entry: HealthEntry, now: datetime) -> bool:
    """Link the entry to the drain for another finding, if that stands or waits; return whether there is one."""
    existing = existing_drain(entry.node, now)
    if existing is not None:
        entry.order = existing
    return existing is not None


def _returns(node: str) -> QuerySet[NodeOrder]:
    """Select the order by which Vigil returns the node after a finding, if it is not carried out yet."""
    return NodeOrder.objects.open().by_health_rules().filter(node=node, action=NodeOrder.Action.UNDRAIN)


def _withdraw_return(entry: HealthEntry, now: datetime) -> bool:
    """Withdraw the order to return the node; return whether there was one, and the scheduler never received it."""
    withdrawn = {"state": NodeOrder.State.REPLACED, "ended_at": now}
    withdrawn["outcome"] = f"Withdrawn: {entry.title} ({entry.rule})."
    if _returns(entry.node).filter(Q(tried_at=None) | Q(outcome__startswith=drain.NOT_SENT)).update(**withdrawn):
        return True
    _returns(entry.node).update(**withdrawn)
    return False


def _obstacle(entry: HealthEntry, control: HealthControl, usage: _LimitUsage) -> str:
    """Return why Vigil does not act by itself; "" if it may."""
    if settings.VIGIL_HEALTH != "act":
        return "Vigil only proposes (VIGIL_HEALTH=propose)."
    if policies.modes()[entry.action] != policies.Mode.ACT:
        return _BY_POLICY.format(entry.action)
    if entry.is_late:
        return "Its evidence was more than 10 minutes old when it arrived."
    if control.tripped_at is not None:
        return f"Automatic actions are stopped: {control.tripped_detail}"
    node = Node.objects.reported().filter(name=entry.node).first()
    if node is None:
        return _UNKNOWN
    return usage.refusal(entry.node)


def _drain(entry: HealthEntry) -> str:
    """Order the drain; return why not if a person drained the node.

    It replaces a hot spare's drain and a drain that is about to end.
    """
    node = Node.objects.filter(name=entry.node).first()
    if node is None:
        return _UNKNOWN
    last = NodeOrder.objects.filter(node=node.name, state=NodeOrder.State.DONE).first()
    is_own = last is not None and drain.is_reason_of(last, node)
    is_ending = last is not None and is_own and (last.rule == SPARE or _returns(node.name).exists())
    try:
        entry.order = drain.request_order(
            None, node, NodeOrder.Action.DRAIN, drain_reason(entry), rule=entry.rule,
            replaces=node.reason if is_ending else None,
        )  # fmt: skip
    except drain.NotOrdered as error:
        return str(error)
    if entry.is_planted:
        entry.order.is_planted = True
        entry.order.save(update_fields=["is_planted"])
    return ""


def _openings(since: datetime, now: datetime) -> list[limits.Opening]:
    """Return what opened since, without what opened in maintenance: work on a rack unplugs many things at once."""
    spans = MaintenanceWindow.spans_by_node(since, now)
    opened = HealthEntry.objects.filter(opened_at__gt=since, action__in=OUT_OF_SERVICE, is_planted=False)
    return [
        limits.Opening(rule, node, at.timestamp())
        # In no order: in that of ids, all entries would be read.
        for rule, node, at in opened.order_by().values_list("rule", "node", "opened_at")
        if at is not None and not any(start <= at < end for start, end in spans.get(node, ()))
    ]


def trip_if_widespread(now: datetime) -> bool:
    """Trip the breaker if one rule opened on many nodes at once; return whether it is tripped.

    It looks back as far as evidence may lie that Vigil acts on: agents report it later if the portal was stopped.
    """
    with transaction.atomic():
        control = HealthControl.locked()
        if control.tripped_at is not None:
            return True
        since = max(now - LATE - _BREAKER, control.reset_at or now - LATE - _BREAKER)
        found = limits.tripping_rule(_openings(since, now), Node.objects.reported().count())
        if found is None:
            return False
        rule, number = found
        control.tripped_at, control.tripped_by = now, rule
        control.tripped_detail = f"{rule} was found on {number} nodes within two minutes."
        control.save(update_fields=["tripped_at", "tripped_by", "tripped_detail"])
        note(None, "health_breaker.tripped", rule, control.tripped_detail)
    return True
