"""Reserve the nodes of maintenance windows in the scheduler, and remove reservations of windows that are over."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from django.db.models import F, Q
from django.utils import timezone

from nodes.cluster import sync
from nodes.models import MaintenanceWindow, Reading, Reservation
from nodes.schedulers.base import Scheduler, SchedulerError

logger = logging.getLogger(__name__)

AGAIN = timedelta(seconds=30)
BUDGET_S = 2.0  # per tick
MAX_AT_ONCE = 5
AT_THE_END = timedelta(minutes=1)
"""The scheduler drops a reservation at its end, by its own clock."""
State = MaintenanceWindow.WindowState


def carry_out(scheduler: Scheduler) -> None:
    """Create and remove what is due, within a tick's budget.

    Each call is recorded; one that was killed in between is repeated harmlessly. A call that failed may have reached
    the scheduler nevertheless: the reservation of a window that is over is removed also if nothing confirmed it.
    """
    _note_missing()
    until = time.monotonic() + BUDGET_S
    now = timezone.now()
    is_over_since = Q(ended_at__gte=F("tried_at"))  # the last call reserved it
    is_in_future = Q(tried_at__gt=now)  # the clock was set back
    due = Q(tried_at=None) | Q(tried_at__lt=now - AGAIN) | is_over_since | is_in_future
    wanted = Q(state__in=(State.PLANNED, State.ACTIVE), wants_reservation=True, reservation="")
    is_tried = ~Q(reservation="") | Q(wants_reservation=True, tried_at__isnull=False)
    unwanted = Q(state__in=(State.ENDED, State.CANCELLED)) & is_tried
    windows = MaintenanceWindow.objects.filter(due, wanted | unwanted).order_by("pk")[:MAX_AT_ONCE]
    for number, window in enumerate(windows):
        if number and time.monotonic() > until:
            return
        if window.is_unfinished:
            _reserve(window, scheduler)
        else:
            _remove(window, scheduler)


def _note_missing() -> None:
    """Record which reservations the scheduler no longer lists, though their windows stand: they are made again.

    Somebody deleted them, or the scheduler lost its state. Meanwhile jobs would start there.
    """
    now = timezone.now()
    rows = MaintenanceWindow.objects.unfinished().exclude(reservation="").filter(ends_at__gt=now + AT_THE_END)
    reading = sync.readings()[Reading.Part.RESERVATIONS] if rows.exists() else None
    if reading is None or reading.read_at is None or reading.error or reading.unreadable:
        return
    # A reading that had begun before the reservation was made does not list it.
    before = Q(tried_at=None) | Q(tried_at__lt=reading.read_at - AGAIN)
    listed = Reservation.objects.values_list("name", flat=True)
    for window in rows.filter(before).exclude(reservation__in=listed):
        problem = f"The reservation {window.reservation} was deleted in the scheduler. Vigil reserves the nodes again."
        rows.filter(pk=window.pk).update(reservation="", tried_at=None, problem=problem)
        logger.warning("maintenance %d: %s", window.pk, problem)


def _name(window: MaintenanceWindow) -> str:
    # The time makes it unique: a restored database may give a number a second time.
    return f"vigil_maintenance_{window.pk}_{int(window.planned_at.timestamp())}"


def _reserve(window: MaintenanceWindow, scheduler: Scheduler) -> None:
    rows = MaintenanceWindow.objects.filter(pk=window.pk)
    if not rows.unfinished().update(tried_at=timezone.now()):
        return  # cancelled since it was read
    try:
        scheduler.reserve_window(
            _name(window), window.nodes, starts_at=window.starts_at.timestamp(), ends_at=window.ends_at.timestamp()
        )
    except SchedulerError as error:
        changes: dict[str, object] = {"tried_at": timezone.now(), "problem": str(error)}
        if error.permanent:  # Vigil drains the nodes at the start instead
            changes |= {"wants_reservation": False, "problem": f"Not reserved: {error} Vigil drains the nodes instead."}
        rows.update(**changes)
        logger.warning("maintenance %d: %s", window.pk, error)
        return
    rows.update(reservation=_name(window), problem="")
    sync.hurry(Reading.Part.RESERVATIONS)


def _remove(window: MaintenanceWindow, scheduler: Scheduler) -> None:
    rows = MaintenanceWindow.objects.filter(pk=window.pk)
    try:
        scheduler.unreserve(window.reservation or _name(window))
    except SchedulerError as error:
        rows.update(tried_at=timezone.now(), problem=str(error))
        logger.warning("maintenance %d: %s", window.pk, error)
        return
    rows.update(reservation="", tried_at=None)
    sync.hurry(Reading.Part.RESERVATIONS)
