"""Plan maintenance, and drain and undrain its nodes at its times.

Where the scheduler reserves the nodes (`nodes.drains.reservations`), nothing is drained: it starts no job that would
overlap. Otherwise Vigil drains the nodes at the start, and at the end undrains those that it drained, unless somebody
changed the reason. Two windows may overlap: a node that another open window wants passes on to that one.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Case, Exists, F, OuterRef, Q, QuerySet, Value, When
from django.utils import timezone

from nodes.cluster import drain, sync
from nodes.cluster.newest_orders import newest_order
from nodes.drains import bulk
from nodes.health.requesters import MAINTENANCE_PREFIX
from nodes.health.rules.rule import OUT_OF_SERVICE
from nodes.models import HealthControl, HealthEntry, MaintenanceWindow, Node, NodeOrder, Reading
from nodes.remediation.return_to_service import request_return
from portal.access import note
from portal.audit import Change
from portal.bulk import give_way
from portal.models import User
from vigil_core import formatting

logger = logging.getLogger(__name__)

LONGEST = timedelta(days=31)
FARTHEST = timedelta(days=366)
MAX_UNFINISHED = 100
REPEAT_FOR = timedelta(days=1)
"""How long after a window's end Vigil repeats an order to return a node that failed."""
MAX_REPEATED = 100
CLOCK_SET_BACK = timedelta(days=1)
"""An order may seem older than its window by so much, if the clock was set back in between."""
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
    if not reason or len(reason) > MaintenanceWindow.MAX_REASON or not reason.isprintable():
        raise BadWindow("reason", f"Give a reason of at most {MaintenanceWindow.MAX_REASON} characters.")
    if ends_at <= max(now, starts_at):
        raise BadWindow("ends_at", "The end must be after the start, and in the future.")
    if ends_at - max(starts_at, now) > LONGEST:
        raise BadWindow("ends_at", f"A window lasts at most {LONGEST.days} days. For longer, drain the nodes.")
    if starts_at < now - FARTHEST:
        raise BadWindow("starts_at", "The start is more than a year ago.")
    if starts_at > now + FARTHEST:
        raise BadWindow("starts_at", "The start is more than a year ahead.")
    nodes = [node.name for node in bulk.find_nodes(expression)]
    with transaction.atomic():
        HealthControl.locked()
        if MaintenanceWindow.objects.unfinished().count() >= MAX_UNFINISHED:
            raise BadWindow("nodes", f"{MAX_UNFINISHED} windows are planned already. Cancel one first.")
        window = MaintenanceWindow.objects.create(
            expression=expression.strip(), nodes=nodes, reason=reason, starts_at=starts_at, ends_at=ends_at,
            wants_reservation=wants_reservation, planned_by=user,
        )  # fmt: skip
        when = {"from": starts_at.isoformat(), "until": ends_at.isoformat(), "reservation": wants_reservation}
        note(user, "maintenance.planned", window.expression, reason, Change(after=when))
    return window


def cancel(user: User, window: MaintenanceWindow) -> bool:
    """End the window now; what it drained is undrained. Return whether it was unfinished."""
    now = timezone.now()
    with transaction.atomic():
        HealthControl.locked()
        rows = MaintenanceWindow.objects.unfinished().filter(pk=window.pk)
        is_planned = rows.filter(state=State.PLANNED).update(state=State.CANCELLED, cancelled_at=now, ended_at=now)
        # One that has begun is over now: whoever advances windows returns its nodes, if this process is killed.
        if not is_planned and not rows.filter(ends_at__gt=now).update(ends_at=now, cancelled_at=now):
            return False
        note(user, "maintenance.cancelled", window.expression, window.reason)
    if not is_planned:
        _end_if_possible(window, now)
    return True


def advance(now: datetime | None = None) -> None:
    """Begin and end what is due; safe to run twice at once."""
    now = now or timezone.now()
    for window in MaintenanceWindow.objects.unfinished().filter(starts_at__lte=now).order_by("pk"):
        if window.ends_at <= now:
            _end_if_possible(window, now)
        elif not window.reservation and (window.problem or not window.wants_reservation):
            _drain_missing(window)  # also while the scheduler fails to reserve the nodes
        elif window.state == State.PLANNED:
            _begin(window)
    _repeat_returns(now)


def _begin(window: MaintenanceWindow) -> None:
    if MaintenanceWindow.objects.filter(pk=window.pk, state=State.PLANNED).update(state=State.ACTIVE):
        logger.info("maintenance %d begins on %s", window.pk, window.expression)


def _drain_missing(window: MaintenanceWindow) -> None:
    """Begin the window, and order to drain its nodes that are in service.

    Each node is ordered once. One that a person undrains after the window has begun stays in service, whoever had
    drained it. An order that was refused is repeated.

    A window may have a thousand nodes: each transaction orders for some of them, so that other writers get their turn.
    """
    _begin(window)
    in_service = _in_service(window.nodes)
    settled = _settled(window, in_service) if in_service else set()
    for names in _batches([name for name in in_service if name not in settled]):
        with transaction.atomic():
            HealthControl.locked()
            if not MaintenanceWindow.objects.filter(pk=window.pk, state=State.ACTIVE).exists():
                return  # cancelled meanwhile
            _drain(window, names)


def _drain(window: MaintenanceWindow, names: Sequence[str]) -> None:
    done = _settled(window, names)  # by another worker, or a person
    # The row of a node that was drained after the last reading still says that it is in service.
    read_at = sync.last_read_at(Reading.Part.NODES) or timezone.now()
    is_unread = Q(state=NodeOrder.State.ASKED) | Q(state=NodeOrder.State.DONE, ended_at__gt=read_at)
    orders = NodeOrder.objects.filter(is_unread, node__in=names, action=NodeOrder.Action.DRAIN)
    done |= set(orders.values_list("node", flat=True))
    for node in _by_name(Node.objects.reported().filter(name__in=names)):
        if node.name in done or not node.is_in_service:
            continue
        try:
            drain.request_order(None, node, NodeOrder.Action.DRAIN, f"[node] {window.reason}", rule=window.requester)
        except drain.NotOrdered as error:
            logger.info("maintenance %d does not drain %s: %s", window.pk, node.name, error)


def _settled(window: MaintenanceWindow, names: Sequence[str]) -> set[str]:
    """Return the nodes that the window ordered to drain, or that a person undrained after it had begun.

    Orders that were refused long enough ago are repeated.
    """
    repeatable = {"state": NodeOrder.State.REFUSED, "ended_at__lt": timezone.now() - drain.GIVE_UP}
    ordered = _orders_of(window).exclude(**repeatable).values_list("node", flat=True)
    by_persons = NodeOrder.objects.filter(
        rule="", action=NodeOrder.Action.UNDRAIN, state=NodeOrder.State.DONE,
        asked_at__gte=max(window.starts_at, window.planned_at), node__in=names,
    )  # fmt: skip
    return set(names).intersection(ordered) | set(by_persons.values_list("node", flat=True))


def _orders_of(window: MaintenanceWindow) -> QuerySet[NodeOrder]:
    """Select what Vigil ordered for the window by the index of orders by time: there may be years of them."""
    since = max(window.starts_at, window.planned_at) - CLOCK_SET_BACK
    return NodeOrder.objects.order_by().exclude(rule="").filter(asked_at__gte=since).filter(rule=window.requester)


def _by_name(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes in the order in which bulk orders lock them."""
    return sorted(nodes, key=lambda node: node.name)


def _end_if_possible(window: MaintenanceWindow, now: datetime) -> None:
    """Return the window's nodes and record its end.

    A node that was drained after the last reading still looks as if it was in service: then the window remains
    unfinished until the nodes have been read, and a later tick ends it.
    """
    read_at = sync.last_read_at(Reading.Part.NODES)  # before the rows: a reading meanwhile must not count
    still_drained = _return_nodes(window, now)
    drains = _orders_of(window).filter(action=NodeOrder.Action.DRAIN, state=NodeOrder.State.DONE)
    newest = drains.order_by("-ended_at").first()
    if newest is not None and drain.is_newer_than_rows(newest, read_at):
        return
    rows = MaintenanceWindow.objects.unfinished().filter(pk=window.pk)
    state = Case(When(cancelled_at=None, then=Value(State.ENDED)), default=Value(State.CANCELLED))
    if rows.update(state=state, ended_at=now, problem=_still_drained_text(still_drained) or F("problem")):
        logger.info("maintenance %d ends on %s", window.pk, window.expression)


def _return_nodes(window: MaintenanceWindow, now: datetime) -> list[str]:
    """Undrain what this window drained and nobody changed since, or pass it on to another open window.

    Return the nodes that stay drained because something is wrong with them. The window stands until all is ordered: a
    worker that is killed in between leaves the rest to the next one.
    """
    still_drained: list[str] = []
    for names in _batches(window.nodes):
        with transaction.atomic():
            HealthControl.locked()
            if not MaintenanceWindow.objects.unfinished().filter(pk=window.pk).exists():
                return []  # another worker or a person was faster
            still_drained += _return_some(window, names, now)
    return still_drained


def _return_some(window: MaintenanceWindow, names: Sequence[str], now: datetime) -> list[str]:
    findings = HealthEntry.objects.open().filter(node__in=names, action__in=OUT_OF_SERVICE)
    broken = set(findings.values_list("node", flat=True))
    other_windows = list(
        MaintenanceWindow.objects.open_at(now).filter(reservation="").exclude(pk=window.pk).order_by("pk")
    )
    drained = NodeOrder.objects.filter(node__in=names, rule=window.requester).values_list("node", flat=True)
    still_drained: list[str] = []
    for name in sorted(set(drained)):
        node = Node.objects.reported().select_for_update().filter(name=name).first()
        if node is None:
            continue
        waiting = NodeOrder.objects.open().filter(node=name, rule=window.requester, action=NodeOrder.Action.DRAIN)
        waiting.update(state=NodeOrder.State.REFUSED, outcome="The maintenance is over.", ended_at=now)
        if not _is_drained_by(window, node):
            continue
        next_window = next((other for other in other_windows if name in other.nodes), None)
        if next_window is None and name in broken:
            still_drained.append(name)
            continue
        try:
            if next_window is None:
                request_return(node, window.requester)
            else:
                reason, rule = f"[node] {next_window.reason}", next_window.requester
                drain.request_order(None, node, NodeOrder.Action.DRAIN, reason, replaces=node.reason, rule=rule)
        except drain.NotOrdered as error:
            logger.info("maintenance %d does not return %s: %s", window.pk, name, error)
    return still_drained


def _is_drained_by(window: MaintenanceWindow, node: Node) -> bool:
    """Return whether the window's drain stands: nobody changed its reason, or ordered anything for the node since."""
    orders = NodeOrder.objects.filter(node=node.name)
    newest, done = newest_order(node.name, timezone.now()), orders.filter(state=NodeOrder.State.DONE).first()
    if newest is None or newest.is_open or done is None or done.action != NodeOrder.Action.DRAIN:
        return False
    return newest.rule == done.rule == window.requester and drain.is_reason_of(done, node)


def _repeat_returns(now: datetime) -> None:
    """Order again to undrain what a window drained, if the scheduler did not answer at its end.

    A node that is gone, or has another reason, is left out: it would take the place of others for a day. Those with an
    open finding, which stay drained, come last.
    """
    recent = NodeOrder.objects.exclude(rule="").filter(asked_at__gt=now - REPEAT_FOR)  # as the index has them
    later = NodeOrder.objects.filter(node=OuterRef("node"), pk__gt=OuterRef("pk"))
    standing = Node.objects.reported().filter(name=OuterRef("node"), reason=OuterRef("replaces"))
    broken = HealthEntry.objects.open().filter(node=OuterRef("node"), action__in=OUT_OF_SERVICE)
    failed = recent.filter(
        ~Exists(later), Exists(standing), rule__startswith=MAINTENANCE_PREFIX, action=NodeOrder.Action.UNDRAIN,
        state=NodeOrder.State.REFUSED, ended_at__lt=now - drain.GIVE_UP,
    )  # fmt: skip
    nodes: defaultdict[str, list[str]] = defaultdict(list)
    for rule, node in failed.order_by(Exists(broken), "asked_at").values_list("rule", "node")[:MAX_REPEATED]:
        nodes[rule].append(node)
    numbers = [number for rule in nodes if (number := rule.removeprefix(MAINTENANCE_PREFIX)).isdecimal()]
    for window in MaintenanceWindow.objects.filter(pk__in=numbers, ended_at__gt=now - REPEAT_FOR):
        for names in _batches(nodes[window.requester]):
            with transaction.atomic():
                HealthControl.locked()
                _return_some(window, names, now)


def _still_drained_text(names: Sequence[str]) -> str:
    return f"{formatting.listed(names)} stayed drained: a finding of health rules is open." if names else ""


def _in_service(names: Sequence[str]) -> list[str]:
    return [
        node.name for node in Node.objects.reported().filter(name__in=names).only("name", "state") if node.is_in_service
    ]


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield some names at a time, and let other writers go first after each transaction."""
    for start in range(0, len(names), bulk.AT_ONCE):
        began = time.monotonic()
        yield names[start : start + bulk.AT_ONCE]
        if start + bulk.AT_ONCE < len(names):
            give_way(began)
