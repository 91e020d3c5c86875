"""Test Celery tasks: those of beat exist, expire and have a queue; an absent broker blocks nobody."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from django.core import mail as letters
from django.utils import timezone
from kombu.exceptions import OperationalError

from jobs import queueing, tasks
from jobs.following import follow
from jobs.models import Incident
from jobs.postmortem import incidents
from jobs.queueing import EXPIRES_S, queue
from portal import queueing as sending
from portal.celery import app
from portal.models import Channel, Lease
from portal.outbox import filling
from portal.sending import due
from portal.ticks import SCHEDULE
from portal.wakes import FOLLOWER, HEALTH
from tests.lab import a_job, a_project, person


def test_every_tick_is_a_task_and_expires() -> None:
    app.loader.import_default_modules()
    for entry in SCHEDULE.values():
        assert entry["task"] in app.tasks
        assert entry["options"]["expires"] <= max(entry["schedule"], 2)


def test_every_task_that_is_queued_by_name_exists_and_expires() -> None:
    app.loader.import_default_modules()
    assert set(get_args(queueing.TaskName)) == set(EXPIRES_S) <= set(app.tasks)
    assert {FOLLOWER.task, HEALTH.task} <= set(app.tasks)


def test_a_queued_task_has_its_arguments_and_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(app, "send_task", lambda name, args, **options: sent.append((name, args, options["expires"])))
    monkeypatch.setattr(sending, "current_app", app)
    queue("jobs.tasks.diagnose", 7)
    assert sent == [("jobs.tasks.diagnose", (7,), 60)]


def test_following_has_a_separate_queue() -> None:
    route = app.amqp.router.route
    assert {route({}, f"jobs.tasks.{name}")["queue"].name for name in ("submit", "follow", "wake")} == {"follow"}
    assert {route({}, f"jobs.tasks.{name}")["queue"].name for name in ("verify", "compact")} == {"work"}
    assert route({}, "jobs.tasks.tail")["queue"].name == "tail"


def test_a_broker_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OperationalError("connection refused")

    monkeypatch.setattr(app, "send_task", refuse)
    monkeypatch.setattr(sending, "current_app", app)
    queue("jobs.tasks.submit", 1)
    assert "the next tick will pick it up: jobs.tasks.submit(1,)" in caplog.text


@pytest.mark.django_db
def test_a_scheduler_that_cannot_be_opened_is_logged(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings.VIGIL_SCHEDULER = "carrier-pigeon"
    assert follow.tick()
    assert "VIGIL_SCHEDULER=carrier-pigeon is not supported" in caplog.text
    assert follow.tick()  # the lease was given back
    assert Lease.objects.get().fence == 2


@pytest.mark.django_db
def test_messages_go_out_between_incidents(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The process that diagnoses also sends: hundreds of failures do not delay a message."""
    mira, sent = person("mira", a_project()), []
    channel = Channel.objects.create(user=mira, kind="email", address="mira@lab.example")
    for _ in range(2):
        attempt = a_job(mira, a_project()).latest
        Incident.objects.create(attempt=attempt, project=a_project(), at=timezone.now(), due_at=timezone.now())

    def diagnose(incident_id: int) -> bool:
        filling.test(channel, "mira")
        sent.append(len(letters.outbox))
        return bool(Incident.objects.filter(pk=incident_id).update(due_at=None))

    monkeypatch.setattr(incidents, "diagnose", diagnose)
    tasks.diagnose(Incident.objects.earliest("pk").pk)
    assert (sent, len(letters.outbox)) == ([0, 1], 2)
    Incident.objects.update(due_at=timezone.now())
    monkeypatch.setattr(due, "send_due", lambda budget_s: 1 / 0)
    tasks.diagnose()
    assert len(sent) == 4, "what cannot be sent keeps no verdict waiting"
    assert "ZeroDivisionError" in caplog.text
