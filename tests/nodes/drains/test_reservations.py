"""Where the scheduler reserves a window's nodes, Vigil drains none, and removes the reservation at the end."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from nodes.cluster import sync
from nodes.drains import maintenance, reservations
from nodes.models import MaintenanceWindow, Reading
from nodes.schedulers.base import SchedulerError
from portal.models import User
from tests.nodes.drains.windows import HOUR, at, planned
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


def test_reserves_where_requested_and_removes_it(lab: Lab, ops: User) -> None:
    window = planned(ops, starts=10, wants_reservation=True)
    reservations.carry_out(lab.scheduler)
    reservations.carry_out(lab.scheduler)
    (created,) = lab.scheduler.reserved
    assert (created.nodes, lab.scheduler.requests.count("reserve_window")) == (("dgx-01", "dgx-02"), 1)
    at(lab, 11)
    assert not lab.scheduler.drained, "the reservation does it"
    maintenance.cancel(ops, window)
    reservations.carry_out(lab.scheduler)
    assert not lab.scheduler.reserved


def test_a_window_cancelled_while_it_was_reserved_is_removed_at_once(
    lab: Lab, ops: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = planned(ops, starts=10, wants_reservation=True)
    reserve = lab.scheduler.reserve_window

    def reserve_slowly(*args: Any, **more: Any) -> None:
        maintenance.cancel(ops, window)
        reserve(*args, **more)

    monkeypatch.setattr(lab.scheduler, "reserve_window", reserve_slowly)
    reservations.carry_out(lab.scheduler)
    assert lab.scheduler.reserved
    reservations.carry_out(lab.scheduler)
    assert not lab.scheduler.reserved


def test_a_reservation_that_somebody_deleted_is_made_again(lab: Lab, ops: User) -> None:
    window = planned(ops, wants_reservation=True)
    reservations.carry_out(lab.scheduler)
    lab.scheduler.reserved.clear()
    sync.read(lab.scheduler, Reading.Part.RESERVATIONS)
    reservations.carry_out(lab.scheduler)
    assert not lab.scheduler.reserved, "the reading may have begun before it was made"
    MaintenanceWindow.objects.update(tried_at=timezone.now() - HOUR)
    lab.scheduler.broken_parts["reserve_window"] = SchedulerError("no answer")
    reservations.carry_out(lab.scheduler)
    window.refresh_from_db()
    assert (window.reservation, window.problem) == ("", "no answer")
    at(lab)
    assert set(lab.scheduler.drained) == {"dgx-01", "dgx-02"}, "no job starts there meanwhile"
    del lab.scheduler.broken_parts["reserve_window"]
    MaintenanceWindow.objects.update(tried_at=timezone.now() - HOUR)
    reservations.carry_out(lab.scheduler)
    assert len(lab.scheduler.reserved) == 1
    sync.read(lab.scheduler, Reading.Part.RESERVATIONS)
    MaintenanceWindow.objects.update(tried_at=timezone.now() - HOUR)
    reservations.carry_out(lab.scheduler)
    assert lab.scheduler.requests.count("reserve_window") == 3, "it is listed again"


def test_a_reservation_that_the_scheduler_drops_at_its_end_is_not_made_again(lab: Lab, ops: User) -> None:
    planned(ops, ends=0.5, wants_reservation=True)
    reservations.carry_out(lab.scheduler)
    lab.scheduler.reserved.clear()
    sync.read(lab.scheduler, Reading.Part.RESERVATIONS)
    MaintenanceWindow.objects.update(tried_at=timezone.now() - HOUR)
    reservations.carry_out(lab.scheduler)
    assert not lab.scheduler.reserved


def test_killed_between_the_reservation_and_its_record_it_makes_no_second(lab: Lab, ops: User) -> None:
    planned(ops, wants_reservation=True)
    reservations.carry_out(lab.scheduler)
    MaintenanceWindow.objects.update(reservation="")
    reservations.carry_out(lab.scheduler)
    assert len(lab.scheduler.reserved) == 1


def test_a_reservation_that_nothing_confirmed_is_removed_with_its_window(
    lab: Lab, ops: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = planned(ops, starts=10, wants_reservation=True)
    reserve = lab.scheduler.reserve_window

    def time_out(*args: Any, **more: Any) -> None:
        reserve(*args, **more)
        raise SchedulerError("no answer within 10 s")

    monkeypatch.setattr(lab.scheduler, "reserve_window", time_out)
    reservations.carry_out(lab.scheduler)
    maintenance.cancel(ops, window)
    MaintenanceWindow.objects.update(tried_at=timezone.now() - reservations.AGAIN)
    reservations.carry_out(lab.scheduler)
    assert not lab.scheduler.reserved
    reservations.carry_out(lab.scheduler)
    assert lab.scheduler.requests.count("unreserve") == 1


def test_a_clock_that_is_set_back_delays_no_retry(lab: Lab, ops: User) -> None:
    planned(ops, starts=10, wants_reservation=True)
    lab.scheduler.broken_parts["reserve_window"] = SchedulerError("no answer")
    reservations.carry_out(lab.scheduler)
    MaintenanceWindow.objects.update(tried_at=timezone.now() + HOUR)
    del lab.scheduler.broken_parts["reserve_window"]
    reservations.carry_out(lab.scheduler)
    assert len(lab.scheduler.reserved) == 1


def test_drains_its_nodes_while_the_scheduler_fails_to_reserve_them(lab: Lab, ops: User) -> None:
    planned(ops, wants_reservation=True)
    lab.scheduler.broken_parts["reserve_window"] = SchedulerError("no answer")
    reservations.carry_out(lab.scheduler)
    at(lab)
    assert set(lab.scheduler.drained) == {"dgx-01", "dgx-02"}
    at(lab, 61)
    assert not lab.scheduler.drained


def test_a_scheduler_that_refuses_or_is_away(lab: Lab, ops: User) -> None:
    window = planned(ops, wants_reservation=True)
    lab.scheduler.broken_parts["reserve_window"] = SchedulerError("no answer")
    reservations.carry_out(lab.scheduler)
    reservations.carry_out(lab.scheduler)
    assert lab.scheduler.requests.count("reserve_window") == 1, "not at every tick"
    MaintenanceWindow.objects.update(tried_at=None)
    lab.scheduler.broken_parts["reserve_window"] = SchedulerError("no right to do so", permanent=True)
    reservations.carry_out(lab.scheduler)
    window.refresh_from_db()
    assert window.problem == "Not reserved: no right to do so Vigil drains the nodes instead."
    at(lab)
    at(lab)
    assert set(lab.scheduler.drained) == {"dgx-01", "dgx-02"}
