"""Test the local scheduler's files: what its watchers write, and in which order its queue is served."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path

import pytest

from nodes.schedulers.local import shim, slots


def test_a_full_disk_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write is retried, with the newest content."""
    place = tmp_path / "jobs" / "1"
    place.mkdir(parents=True)
    slots.write_json(str(place / "request.json"), {"submitted_at": 1.0})
    watcher = shim.Shim(str(place))

    def full(path: str, value: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(slots, "write_json", full)
        watcher.update_status(state="running")
        watcher.update_status(reason="newest")
    watcher.write_status()
    status = slots.read_json(str(place / "status.json"))
    assert status is not None
    assert (status["state"], status["reason"]) == ("running", "newest")


def test_a_job_that_requests_more_than_there_is_holds_up_nobody(tmp_path: Path) -> None:
    """The machine shrank while a job waited for all of it: the next one runs, and its reason explains the wait."""
    for part in ("jobs/1", "jobs/2", "queue"):
        (tmp_path / part).mkdir(parents=True)
    with contextlib.ExitStack() as living:
        for job_id, cpus in ((1, 8), (2, 1)):
            options = {"cpus": cpus, "gpus": 0, "memory_mib": 0, "min_nodes": 1, "max_nodes": 1}
            slots.write_json(slots.ticket_path(str(tmp_path), job_id), options)
            lock = living.enter_context((tmp_path / "jobs" / str(job_id) / "shim.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        slots.write_json(str(tmp_path / "capacity.json"), {"cpus": 2, "gpus": [], "memory_mib": 1000})
        assert slots.take(str(tmp_path), 1) == (None, slots.TOO_LARGE)
        taken, _ = slots.take(str(tmp_path), 2)
        assert taken is not None
        slots.write_json(str(tmp_path / "capacity.json"), {"cpus": 9, "gpus": [], "memory_mib": 1000})
        assert slots.take(str(tmp_path), 1)[0] is not None
