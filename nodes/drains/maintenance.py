"""Plan maintenance, and drain and undrain its nodes at its times.

Where the scheduler reserves the nodes (`nodes.drains.reservations`), nothing is drained: it starts no job that would
overlap. Else Vigil drains at the start what nobody has drained, and undrains at the end what it drained itself, while
its reason stands. Two windows may overlap: a node that another open window wants passes on to that one.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone

from nodes.cluster import drain
from nodes.drains import bulk
from nodes.health.rules.rule import OUT_OF_SERVICE
from nodes.models import HealthControl, HealthEntry, MaintenanceWindow, Node, NodeOrder
from portal.access import note
from portal.audit import Change
from portal.models import User
from vigil_core import formatting

logger = logging.getLogger(__name__)

LONGEST = timedelta(days=31)
FARTHEST = timedelta(days=366)
MOST_STANDING = 100
State = MaintenanceWindow.WindowState


class BadWindow(ValueError):
    """Raised for a window that cannot be planned; `field` names what is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def plan(
    user: User, expression: str, reason: str, starts_at: datetime, ends_at: datetime, *, wants_reservation: bool = False
) -> MaintenanceWindow:
    """Plan a window. Raises BadWindow, BadHostExpression and UnknownNodes."""
    now = timezone.now()
    reason = " ".join(reason.split())
    if not reason or len(reason) > MaintenanceWindow.MOST_REASON or not reason.isprintable():
        raise BadWindow("reason", f"Give a reason of at most {MaintenanceWindow.MOST_REASON} characters.")
    if ends_at <= max(now, starts_at):
        raise BadWindow("ends_at", "The end must lie after the beginning, and in the future.")
    if ends_at - max(starts_at, now) > LONGEST:
        raise BadWindow("ends_at", f"A window lasts at most {LONGEST.days} days. For longer, drain the nodes.")
    if starts_at < now - FARTHEST:
        raise BadWindow("starts_at", "The beginning is more than a year ago.")
    if starts_at > now + FARTHEST:
        raise BadWindow("starts_at", "The beginning is more than a year ahead.")
    nodes = [node.name for node in bulk.find_nodes(expression)]
    with transaction.atomic():
        HealthControl.locked()
        if MaintenanceWindow.objects.standing().count() >= MOST_STANDING:
            raise BadWindow("nodes", f"{MOST_STANDING} windows are planned already. Cancel one first.")
        window = MaintenanceWindow.objects.create(
            expression=expression.strip(), nodes=nodes, reason=reason, starts_at=starts_at, ends_at=ends_at,
            wants_reservation=wants_reservation, planned_by=user,
        )  # fmt: skip
        when = {"from": starts_at.isoformat(), "until": ends_at.isoformat(), "reservation": wants_reservation}
        note(user, "plan maintenance", window.expression, reason, Change(after=when))
    return window


def cancel(user: User, window: MaintenanceWindow) -> bool:
    """End the window now; what it drained is undrained. Return whether it was standing."""
    with transaction.atomic():
        HealthControl.locked()
        rows = MaintenanceWindow.objects.standing().filter(pk=window.pk)
        if not rows.update(state=State.CANCELLED, ended_at=timezone.now()):
            return False
        note(user, "cancel maintenance", window.expression, window.reason)
        window.refresh_from_db()
        _return_nodes(window, timezone.now())
    return True


def advance(now: datetime | None = None) -> None:
    """Begin and end what is due; safe to run twice at once."""
    now = now or timezone.now()
    due = MaintenanceWindow.objects.standing().filter(starts_at__lte=now).order_by("pk")
    for pk in list(due.values_list("pk", flat=True)):
        with transaction.atomic():
            HealthControl.locked()
            window = MaintenanceWindow.objects.standing().filter(pk=pk).first()
            if window is None:  # another worker or a person was faster
                continue
            if window.ends_at <= now:
                _end(window, now)
            elif window.state == State.PLANNED:
                _begin(window)
            elif not window.reservation and not window.wants_reservation:
                _drain_missing(window)


def _begin(window: MaintenanceWindow) -> None:
    window.state = State.ACTIVE
    window.save(update_fields=["state"])
    logger.info("maintenance %d begins on %s", window.pk, window.expression)
    if not window.reservation and not window.wants_reservation:
        _drain_missing(window)


def _drain_missing(window: MaintenanceWindow) -> None:
    """Order to drain the nodes that are in service: also one that somebody undrained, or whose order was refused."""
    ordered = set(NodeOrder.objects.filter(rule=window.requester).values_list("node", flat=True))
    for node in Node.objects.reported().filter(name__in=window.nodes):
        if not node.is_in_service or node.name in ordered:
            continue
        try:
            drain.request_order(None, node, NodeOrder.Action.DRAIN, f"[node] {window.reason}", rule=window.requester)
        except (drain.DrainedByAnother, drain.OrderedByPerson) as error:
            logger.info("maintenance %d does not drain %s: %s", window.pk, node.name, error)


def _end(window: MaintenanceWindow, now: datetime) -> None:
    window.state, window.ended_at = State.ENDED, now
    window.save(update_fields=["state", "ended_at"])
    logger.info("maintenance %d ends on %s", window.pk, window.expression)
    _return_nodes(window, now)


def _return_nodes(window: MaintenanceWindow, now: datetime) -> None:
    """Undrain what this window drained and nobody changed since, or pass it on to another open window."""
    waiting = NodeOrder.objects.open().filter(rule=window.requester, action=NodeOrder.Action.DRAIN)
    waiting.update(state=NodeOrder.State.REFUSED, outcome="The maintenance is over.", ended_at=now)
    findings = HealthEntry.objects.open().filter(node__in=window.nodes, action__in=OUT_OF_SERVICE)
    broken = set(findings.values_list("node", flat=True))
    others = list(MaintenanceWindow.objects.open_at(now).filter(reservation="").exclude(pk=window.pk).order_by("pk"))
    kept: list[str] = []
    for node in Node.objects.reported().filter(name__in=window.nodes):
        newest = NodeOrder.objects.filter(node=node.name).first()
        if newest is None or newest.rule != window.requester or newest.action != NodeOrder.Action.DRAIN:
            continue
        if newest.state != NodeOrder.State.DONE or not drain.is_reason_of(newest, node):
            continue
        heir = next((other for other in others if node.name in other.nodes), None)
        if heir is None and node.name in broken:
            kept.append(node.name)
            continue
        action = NodeOrder.Action.UNDRAIN if heir is None else NodeOrder.Action.DRAIN
        reason = "" if heir is None else f"[node] {heir.reason}"
        rule = window.requester if heir is None else heir.requester
        try:
            drain.request_order(None, node, action, reason, replaces=node.reason, rule=rule)
        except (drain.DrainedByAnother, drain.OrderedByPerson) as error:
            logger.info("maintenance %d does not return %s: %s", window.pk, node.name, error)
    if kept:
        window.problem = f"{formatting.listed(kept)} stayed drained: a finding of health rules is open."
        window.save(update_fields=["problem"])
