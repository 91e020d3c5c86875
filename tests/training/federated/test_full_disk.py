"""Test a federation whose folder is full for a while: it trains on, and reports each round once there is space."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.file_systems import small_file_system
from tests.training.ranks import Run
from tests.waiting import until
from training.attempt.heartbeat import heartbeat_path, read_beat
from training.federation.tables import RoundTable

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Provide a run on a file system of 4 MiB, where one may be mounted."""
    options = {"recipe": "tabular", "rounds": 100_000, "clients": 4, "validate_every": 0, "checkpoint_every": 5}
    run = Run(tmp_path / "run", {**options, "keep_checkpoints": 2, "flush_steps": 1}, kind="federated")
    with small_file_system(run.job_dir, "4m"):
        yield run


def test_no_round_is_untold(run: Run) -> None:
    incarnation = run.start(1)
    try:
        until(lambda: run.checkpoints)
        with _full(run.job_dir / "filler"):
            until(lambda: _beat(run) > run.checkpoints[-1].step + 15)
            assert run.checkpoints, "the old ones are intact"
            beat = _beat(run)
        until(lambda: run.checkpoints[-1].step > beat)
        (incarnation.attempt_dir / "stop-requested").write_text('{"reason": "cancel"}')
        assert incarnation.wait() == [0], incarnation.output()
    finally:
        incarnation.kill()
    last = run.checkpoints[-1].step
    assert sorted(run.series("loss")) == list(range(1, last + 1))
    tables = [RoundTable.unpack(event) for event in run.events("round.clients")]
    assert np.concatenate([table.rounds["round"] for table in tables]).tolist() == list(range(1, last + 1))
    assert any("No space left on device" in event["reason"] for event in run.events("checkpoint.skipped"))
    assert not run.events("report.dropped")


@contextmanager
def _full(filler: Path) -> Iterator[None]:
    """Fill the disk to the last byte, whatever is freed meanwhile."""
    over = threading.Event()

    def fill() -> None:
        with open(filler, "wb", buffering=0) as file:
            while not over.wait(0.002):
                for size in (65_536, 1):
                    with suppress(OSError):
                        while True:
                            os.write(file.fileno(), bytes(size))

    filling = threading.Thread(target=fill)
    filling.start()
    try:
        yield
    finally:
        over.set()
        filling.join()
        filler.unlink()


def _beat(run: Run) -> int:
    """The round that it is in."""
    found = read_beat(heartbeat_path(run.job_dir / f"attempt-{run.attempts}", rank=0, incarnation=0))
    return found.step if found else 0
