"""Follow open findings whose node somebody undrained: that stands until the same happens again.

Nobody has to clear a finding before they undrain its node. It stays open then, without a decision and without an order,
and `decided_at` says since when. What was observed before never takes the node out of service again, nor does a state
that just lasts. After new evidence it is decided about as any other finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from django.db import transaction
from django.db.models import F

from nodes.cluster import drain, sync
from nodes.cluster.newest_orders import newest_orders
from nodes.health.rules.rule import OUT_OF_SERVICE, Rule
from nodes.health.rules.signal import SIGNALS
from nodes.models import HealthControl, HealthEntry, Node, NodeOrder, Reading
from nodes.monitoring.evaluate import LATE
from nodes.monitoring.rule_progress import progress_of
from nodes.monitoring.site_rules import rules_in_force

AT_ONCE = 500
"""Entries whose evidence is read in one pass, those with the newest first."""
Decision = HealthEntry.EntryDecision


class _Undrain(NamedTuple):
    at: datetime
    text: str


def follow_undrains(now: datetime) -> None:
    """Take back the decisions about findings whose node was undrained; safe to run twice at once."""
    read_at = sync.last_read_at(Reading.Part.NODES)  # before the rows: a reading meanwhile must not count
    entries = HealthEntry.objects.open().filter(
        decision__in=(Decision.AUTOMATIC, Decision.APPROVED), action__in=OUT_OF_SERVICE,
        order__state__in=(NodeOrder.State.DONE, NodeOrder.State.REPLACED),
    )  # fmt: skip
    rows = Node.objects.reported().filter(name__in=entries.values("node"))
    nodes = {node.name: node for node in rows}
    last_orders = newest_orders(rows, state=NodeOrder.State.DONE).select_related("asked_by")
    last = {order.node: order for order in last_orders}
    for entry in entries.select_related("order").defer("evidence", "progress"):
        if entry.order is None or entry.node not in nodes:
            continue
        if undrain := _undrain(entry.order, nodes[entry.node], last.get(entry.node), read_at, now):
            _take_back(entry, undrain)


def _undrain(
    order: NodeOrder, node: Node, last: NodeOrder | None, read_at: datetime | None, now: datetime
) -> _Undrain | None:
    """Return how a person returned the node to service after the drain was ordered; None if nobody did.

    `last` is the node's last order that was carried out.
    """
    again = "If it happens again, Vigil decides again."
    if last is not None and last.action == NodeOrder.Action.UNDRAIN and last.pk > order.pk:
        is_persons = not last.rule  # and not for a burn-in
        return _Undrain(last.ended_at or now, f"{last.requester} undrained the node. {again}") if is_persons else None
    if node.is_stale or not node.is_in_service or (last is not None and drain.is_newer_than_rows(last, read_at)):
        return None
    if NodeOrder.objects.open().filter(node=node.name).exists():
        return None
    return _Undrain(now, f"The node was undrained outside Vigil. {again}")


def _take_back(entry: HealthEntry, undrain: _Undrain) -> None:
    with transaction.atomic():
        HealthControl.locked()
        HealthEntry.objects.open().filter(pk=entry.pk, decision=entry.decision, order=entry.order).update(
            decision=Decision.NONE, decided_by=None, decided_at=undrain.at, decision_reason="", order=None,
            held_back=undrain.text,
        )  # fmt: skip


def decide_again(now: datetime) -> None:
    """Make findings undecided that happened again after their node was undrained."""
    rules = rules_in_force()
    undrained = HealthEntry.objects.undrained().filter(last_seen__gt=F("decided_at"))
    for entry in undrained.select_related("gpu").order_by("-last_seen")[:AT_ONCE]:
        newest = _newest_evidence(entry, rules, now)
        if newest is None or entry.decided_at is None or newest <= entry.decided_at:
            continue
        HealthEntry.objects.undrained().filter(pk=entry.pk, decided_at=entry.decided_at).update(
            decided_at=None, held_back="", is_late=newest < now - LATE
        )


def _newest_evidence(entry: HealthEntry, rules: Mapping[str, Rule], now: datetime) -> datetime | None:
    """Return when the newest event was, or when a state began that has lasted as long as the rule wants."""
    found = [o.at for o in entry.observations() if o.signal in SIGNALS and SIGNALS[o.signal].is_event]
    if (rule := rules.get(entry.rule)) is not None:
        holding = progress_of(entry, rule).holding.items()
        found += [since for place, since in holding if since + rule.triggers[place].for_s <= now.timestamp()]
    return datetime.fromtimestamp(max(found), UTC) if found else None
