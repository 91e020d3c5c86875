"""Test that workers retry an absent broker every second, and that one which left at a bad moment stops no worker."""

from contextlib import suppress
from pathlib import Path

import kombu
import pytest
from kombu.exceptions import OperationalError

from portal import broker
from portal.celery import app
from tests.redis import redis_up


def test_tries_never_become_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    errors: list[Exception] = []
    monkeypatch.setattr("kombu.utils.functional.sleep", slept.append)
    connection = app.connection_for_read(f"redis+socket://{tmp_path}/none.sock")
    with pytest.raises(OperationalError):
        connection.ensure_connection(lambda error, wait: errors.append(error), max_retries=40)
    waits = [seconds for seconds in slept if seconds]
    assert waits[0] <= broker.FIRST_RETRY_S
    assert max(waits) <= broker.MAX_RETRY_S
    assert len(waits) >= 40
    assert len(errors) == 1, "each call is three lines of the log"


@pytest.mark.parametrize("settle", ["ack", "reject"])
def test_a_message_that_cannot_be_settled_does_not_stop_its_worker(tmp_path: Path, settle: str) -> None:
    """If Redis died between the end of a task and its acknowledgement, the worker neither took messages nor failed."""
    with redis_up(tmp_path) as server:
        url = server.url.replace("unix://", "redis+socket://")
        with app.connection_for_read(url) as connection, app.connection_for_write(url) as other:
            received: list[kombu.Message] = []
            with connection.Consumer(kombu.Queue("work"), on_message=received.append) as consumer:
                consumer.qos(prefetch_count=1)
                other.Producer().publish({}, routing_key="work")
                connection.drain_events(timeout=20)
                server.kill()
                with pytest.raises(connection.connection_errors):
                    getattr(received[0], settle)()
                server.start()
                other.Producer().publish({}, routing_key="work", retry=True)
                with suppress(*connection.connection_errors):  # then a worker connects again
                    connection.drain_events(timeout=20)
                    assert len(received) == 2
