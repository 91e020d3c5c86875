"""Test that workers retry an absent broker every second, however long it has been away."""

from pathlib import Path

import pytest
from kombu.exceptions import OperationalError

from portal import broker
from portal.celery import app


def test_tries_never_become_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    errors: list[Exception] = []
    monkeypatch.setattr("kombu.utils.functional.sleep", slept.append)
    connection = app.connection_for_read(f"redis+socket://{tmp_path}/none.sock")
    with pytest.raises(OperationalError):
        connection.ensure_connection(lambda error, wait: errors.append(error), max_retries=40)
    waits = [seconds for seconds in slept if seconds]
    assert waits[0] <= broker.FIRST_RETRY_S
    assert max(waits) <= broker.LONGEST_RETRY_S
    assert len(waits) >= 40
    assert len(errors) == 1, "each call is three lines of the log"
