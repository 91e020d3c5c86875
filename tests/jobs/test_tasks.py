"""Celery's side: what beat ticks exists, expires and has its queue; a broker that is gone keeps nobody waiting."""

from __future__ import annotations

from typing import Any

import pytest
from kombu.exceptions import OperationalError

from jobs import tasks
from jobs.following import follow
from jobs.queueing import queue
from portal.celery import app
from portal.models import Lease
from portal.ticks import SCHEDULE


def test_every_tick_is_a_task_and_expires() -> None:
    app.loader.import_default_modules()
    for entry in SCHEDULE.values():
        assert entry["task"] in app.tasks
        assert entry["options"]["expires"] <= max(entry["schedule"], 2)


def test_following_has_a_queue_of_its_own() -> None:
    route = app.amqp.router.route
    assert {route({}, f"jobs.tasks.{name}")["queue"].name for name in ("submit", "follow", "wake")} == {"follow"}
    assert {route({}, f"jobs.tasks.{name}")["queue"].name for name in ("verify", "compact")} == {"work"}
    assert route({}, "jobs.tasks.tail")["queue"].name == "tail"


def test_a_broker_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OperationalError("connection refused")

    monkeypatch.setattr(tasks.submit, "apply_async", refuse)
    queue(tasks.submit, 1)
    assert "the next tick finds it: jobs.tasks.submit(1,)" in caplog.text


@pytest.mark.django_db
def test_a_scheduler_that_cannot_be_opened_is_said(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings.VIGIL_SCHEDULER = "carrier-pigeon"
    assert follow.tick()
    assert "VIGIL_SCHEDULER=carrier-pigeon is not known" in caplog.text
    assert follow.tick()  # the lease was given back
    assert Lease.objects.get().fence == 2
