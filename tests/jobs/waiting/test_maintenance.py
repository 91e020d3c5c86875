"""Test what a waiting job shows about maintenance: with reservations, where Vigil drains, and on a single machine."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from nodes.cluster import sync
from nodes.drains import maintenance as windows
from nodes.schedulers.base import NodeStatus
from nodes.schedulers.cluster import QueuedJobInfo, ReservationInfo
from nodes.scheduling.maintenance import PlannedMaintenance
from portal.models import Project, User
from tests.jobs.pages.reading import text
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.waiting.queues import NOW, cluster, gpu_spec, node, now, plain, texts, why
from tests.jobs.waiting.test_pending import GPU, HALVES, eight_gpus, queued
from tests.lab import bearer, signed_in, sysadmin
from tests.vigil_cli.commands import portal, vigil  # noqa: F401

HOUR = 3600.0


def read_queue(job: QueuedJobInfo, machines: list[NodeStatus] = HALVES) -> None:
    sync.read(ScriptedScheduler(machines=machines, divided=[GPU], queued=[job]))


def window(*nodes: str, begins: float = 4, ends: float = 8, **facts: Any) -> PlannedMaintenance:
    """Return a window that starts and ends so many hours from now."""
    given = {"reason": "New fans.", "requester": "maintenance-5", **facts}
    return PlannedMaintenance(nodes=frozenset(nodes), starts_at=NOW + begins * HOUR, ends_at=NOW + ends * HOUR, **given)


def test_a_time_limit_that_reaches_into_a_reserved_window_names_the_window() -> None:
    planned = window("a", is_reserved=True, reservation="vigil_maintenance_5_1")
    claim = ReservationInfo(
        name="vigil_maintenance_5_1", nodes=("a",), starts_at=planned.starts_at, ends_at=planned.ends_at
    )
    where = cluster(node("a"), reservations=(claim,))
    found = why(gpu_spec(), where, "ReqNodeNotAvail, Reserved for maintenance", maintenance=[planned])
    block = found.blocks[0]
    assert (block.kind, block.is_reason, found.never) == ("maintenance", True, False)
    assert plain(block.text).startswith("Maintenance begins on a at ")
    assert "in 4 h, and ends at " in plain(block.text)
    assert plain(block.text).endswith(": New fans. This job requests 12 h, so it starts there only afterwards.")
    assert "reservation" not in [block.kind for block in found.blocks], "it is named once"
    assert now(found)[0] == {"resources.time_limit": "03:45:00"}


def test_drained_nodes_of_a_window_show_until_when() -> None:
    planned = window("a", "b", begins=-1, ends=2)
    drained = "[node] New fans (vigil: maintenance-5)"
    where = cluster(*(node(name, state="drained", reason=drained) for name in "ab"), node("c", 4))
    found = why(gpu_spec(2), where, maintenance=[planned])
    assert [(block.kind, block.is_reason) for block in found.blocks][:2] == [("maintenance", True), ("nodes", True)]
    assert "Maintenance on a and b since " in texts(found)[0]
    assert "in 2 h: New fans." in texts(found)[0]
    found = why(gpu_spec(1), where, maintenance=[planned])
    reasons = {block.kind: block.is_reason for block in found.blocks}
    assert (reasons["maintenance"], reasons["nodes"]) == (False, True), "c is enough once it is free"


def test_a_window_ahead_that_vigil_drains_for_blocks_nothing_yet() -> None:
    found = why(gpu_spec(), cluster(node("a", 4)), maintenance=[window("a")])
    assert "maintenance" not in [block.kind for block in found.blocks]
    (effect,) = found.coming_maintenance
    assert plain(effect.text).endswith("No job starts there meanwhile; one that runs continues.")


@pytest.mark.parametrize("planned", [window("z"), window("a", begins=13, ends=20), window("a", begins=-9, ends=-1)])
def test_windows_that_do_not_concern_it_are_left_out(planned: PlannedMaintenance) -> None:
    assert not why(gpu_spec(), cluster(node("a", 4)), maintenance=[planned]).maintenance


def test_many_nodes_are_counted() -> None:
    names = [f"dgx-{i:02d}" for i in range(1, 13)]
    planned = window(*names, begins=-1, ends=2)
    found = why(gpu_spec(), cluster(*(node(name, state="drained") for name in names)), maintenance=[planned])
    assert texts(found)[0].startswith("Maintenance on all 12 nodes that it could use (dgx-01 … dgx-12) since ")


def test_a_single_machine_waits_for_the_end_of_the_window_not_for_a_sysadmin() -> None:
    reason = "[node] New fans (vigil: maintenance-5)"
    machine = node("box", state="drained", reason=reason, plays_many=True)
    found = why(gpu_spec(), cluster(machine), maintenance=[window("box", begins=-1, ends=2)])
    assert [block.kind for block in found.blocks] == ["maintenance"]
    by_person = node("box", state="drained", reason="broken fan", plays_many=True)
    found = why(gpu_spec(), cluster(by_person), maintenance=[window("box", begins=-1, ends=2)])
    assert [block.kind for block in found.blocks][:2] == ["maintenance", "nodes"]
    assert "until a sysadmin undrains it" in texts(found)[1]


@pytest.mark.django_db
def test_page_and_rest_name_the_window(oskar: User, project: Project) -> None:
    read_queue(queued("77"))
    job = eight_gpus(oskar, project)
    starts = timezone.now() + timedelta(hours=2)
    windows.plan(sysadmin("ops"), "dgx-[01-03]", "new fans", starts, starts + timedelta(hours=4))
    found = bearer(oskar).get(f"/api/v1/jobs/{job.pk}/why").json()
    (planned,) = found["maintenance"]
    assert (planned["reason"], planned["nodes"], planned["is_blocking"]) == (
        "new fans", ["dgx-01", "dgx-02", "dgx-03"], False,
    )  # fmt: skip
    page = text(signed_in(oskar).get(f"/jobs/{job.pk}"))
    assert "Planned maintenance" in page
    assert plain(planned["text"]) in plain(page)


@pytest.mark.django_db
def test_the_pages_lead_names_the_end_of_maintenance(oskar: User, project: Project) -> None:
    read_queue(queued("77"), [replace(machine, state="drained") for machine in HALVES])
    job = eight_gpus(oskar, project, reason="ReqNodeNotAvail, UnavailableNodes:dgx-01")
    now = timezone.now()
    windows.plan(sysadmin("ops"), "dgx-[01-03]", "new fans", now - timedelta(hours=1), now + timedelta(hours=4))
    page = text(signed_in(oskar).get(f"/jobs/{job.pk}"))
    assert "In maintenance until" in page
    assert "Maintenance on dgx-01, dgx-02 and dgx-03 since" in page


def test_the_command_line_names_it(portal):  # noqa: F811
    answer = {
        "job": 7, "state": "pending", "text": "It needs 8 free GPUs.", "scheduler_reason": "", "meaning": "",
        "starts_at": None, "blocks": [], "variants": [], "stale": "", "reported_at": None,
        "maintenance": [{"text": "Maintenance begins on dgx-01 at 22:00.", "is_blocking": False}],
    }  # fmt: skip
    portal.answers["GET", "jobs/7/why"] = answer
    assert vigil("why", "7").output.splitlines()[1] == "  planned: Maintenance begins on dgx-01 at 22:00."
