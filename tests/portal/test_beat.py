"""Test beat while Redis is away: one log line when it disappears, one when it returns, and sending resumes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery
from celery.beat import ScheduleEntry

from portal.beat import Scheduler
from portal.broker import Broker
from tests.redis import Server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def scheduler(server: Server, tmp_path: Path) -> Iterator[Scheduler]:
    app = Celery("ticking", fixups=[], amqp=Broker, set_as_current=False)
    app.conf.update(
        broker_url=server.url.replace("unix://", "redis+socket://"),
        broker_transport_options={"max_retries": 1, "interval_start": 0, "interval_step": 0.1},
        beat_schedule={"tick": {"task": "no.such.task", "schedule": 1.0}},
    )
    scheduler = Scheduler(app, schedule_filename=str(tmp_path / "schedule"))
    yield scheduler
    scheduler.close()


def tick(scheduler: Scheduler, times: int = 1) -> None:
    for _ in range(times):
        scheduler.apply_entry(scheduler.schedule["tick"], producer=scheduler.producer)


def sent(scheduler: Scheduler) -> int:
    with scheduler.app.connection_for_write() as connection:
        return int(connection.default_channel.client.llen("celery"))


def test_an_outage_of_redis_is_two_lines(
    scheduler: Scheduler, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.start()
    tick(scheduler, 2)
    assert caplog.messages == []
    for _ in range(2):
        caplog.clear()
        server.kill()
        tick(scheduler, 5)
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith("Redis does not answer (")
        server.start()
        waiting = sent(scheduler)  # a server that is killed may forget what came last
        tick(scheduler, 3)
        assert len(caplog.messages) == 2
        assert caplog.messages[1].endswith("Ticks not sent: 5.")
        assert not any(record.exc_info for record in caplog.records)
        assert sent(scheduler) == waiting + 3


def test_what_is_no_outage_has_its_traceback(
    scheduler: Scheduler, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.start()
    entry = ScheduleEntry("broken", "no.such.task", schedule=1.0, kwargs={"what": object()}, app=scheduler.app)
    scheduler.apply_entry(entry, producer=scheduler.producer)
    assert [record.exc_info is not None for record in caplog.records] == [True]
