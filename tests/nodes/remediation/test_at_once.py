"""An Xid is judged and its order carried out at once; if the message about it is lost, at the next period."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_django import DjangoCaptureOnCommitCallbacks

from nodes.cluster import drain
from nodes.models import NodeOrder
from nodes.tasks import judge
from portal import publish, wakes
from portal.wakes import FOLLOWER, HEALTH
from tests.nodes.remediation.cluster import Lab
from tests.redis import Server, redis_up

pytestmark = pytest.mark.django_db


@pytest.fixture
def server(tmp_path: Path, settings: Any) -> Iterator[Server]:
    with redis_up(tmp_path / "redis") as made:
        settings.REDIS_URL = made.url
        publish.connection.cache_clear()
        yield made
    publish.connection.cache_clear()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the tasks that are queued."""
    names: list[str] = []
    monkeypatch.setattr(wakes, "send", lambda task, *args, **options: names.append(task))
    monkeypatch.setattr(wakes, "_retry_at", 0.0)
    return names


@pytest.fixture
def lab(settings: Any) -> Lab:
    settings.VIGIL_HEALTH = "act"
    return Lab()


def test_an_xid_drains_without_waiting_for_a_period(
    lab: Lab, server: Server, sent: list[str], django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        lab.xid(79)
        lab.xid(79)
    assert sent == [HEALTH.task], "two posts wake it once"
    with django_capture_on_commit_callbacks(execute=True):
        judge()
    assert sent == [HEALTH.task, FOLLOWER.task]
    drain.carry_out(lab.scheduler)
    assert lab.scheduler.drained == {"dgx-01": "[node] Xid 79 on GPU 0 (vigil: off-bus)"}


def test_samples_wake_nobody(
    lab: Lab, server: Server, sent: list[str], django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        machine = lab.machine()
        machine.post(machine.batch(1_800_000_000, gpu_percent=3))
        lab.happens("mount.slow", mount="/data")
    assert sent == []


def test_a_lost_message_only_costs_the_period(lab: Lab) -> None:
    lab.xid(79)
    lab.step()
    judge()
    assert list(lab.scheduler.drained) == ["dgx-01"]
    assert NodeOrder.objects.count() == 1


def test_without_redis_a_report_is_stored_all_the_same(
    lab: Lab,
    server: Server,
    sent: list[str],
    django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks,
) -> None:
    server.kill()
    with django_capture_on_commit_callbacks(execute=True):
        lab.xid(79)
    assert sent == []
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-01"]
