"""Test a federation under Vigil's launcher: killed or stopped within a round, it arrives at the very same model."""

from __future__ import annotations

import hashlib
import json
import signal
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.training.launching import KILLS, Run
from tests.waiting import until
from training.attempt.heartbeat import heartbeat_path, read_beat

pytestmark = pytest.mark.slow

ROUNDS = 100
TEXT = f"""
kind = "federated"
[launch]
ranks_per_node = 2
[run]
recipe = "tabular"
rounds = {ROUNDS}
clients = 60
per_round = 20
split = "dirichlet"
learning_rate = 0.3
checkpoint_every = 4
validate_every = 5
flush_steps = 1
{{more}}
"""
FOR_ALL = """
algorithm = "scaffold"
"""
"""Each client's control variate lies on one of the two ranks."""
LATE = """
algorithm = "fedbuff"
pace = "asynchronous"
[run.asynchronous]
buffer = 5
"""


def _digests(run: Run) -> dict[str, str]:
    """Return the digest of each tensor in the last checkpoint."""
    whole = run.path / "whole.pt"
    dcp_to_torch_save(run.path / "job" / "checkpoints" / f"step-{ROUNDS}", whole)
    tensors = _leaves(torch.load(whole, weights_only=True))
    assert tensors
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def _leaves(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {prefix: state}
    return {name: leaf for key, value in state.items() for name, leaf in _leaves(value, f"{prefix}.{key}").items()}


def _rank(run: Run, rank: int, gone: set[int]) -> psutil.Process:
    def found() -> psutil.Process | None:
        for process in run.processes():
            with suppress(psutil.NoSuchProcess):
                if process.pid not in gone and process.environ().get("RANK") == str(rank):
                    return process
        return None

    process = until(found)
    assert isinstance(process, psutil.Process)
    return process


def _kill(run: Run, rank: int, incarnation: int, round_: int, gone: set[int]) -> None:
    """Kill it in a round after this one."""
    _in_a_round(run, round_, rank=rank, incarnation=incarnation)
    process = _rank(run, rank, gone)
    gone.add(process.pid)
    process.send_signal(signal.SIGKILL)
    until(lambda: len(run.events("incarnation.ended")) > incarnation)


def _in_a_round(run: Run, after: int, *, attempt: int = 1, rank: int = 0, incarnation: int = 0) -> None:
    """Wait until it is in a round after this one, with a checkpoint from which to resume."""
    path = heartbeat_path(run.attempt(attempt), rank=rank, incarnation=incarnation)
    until(lambda: [*run.path.glob("job/checkpoints/step-*/COMMITTED")])
    until(lambda: (beat := read_beat(path)) and beat.phase == "step" and beat.step >= after)


@pytest.fixture(scope="class")
def undisturbed(more: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the model of an undisturbed run."""
    run = Run(tmp_path_factory.mktemp("undisturbed") / "run")
    try:
        run.describe(TEXT.format(more=more))
        assert run.launch().wait(240) == 0, run.log()
        return _digests(run)
    finally:
        run.end()


@pytest.mark.parametrize(
    "more", [FOR_ALL, pytest.param(LATE, marks=pytest.mark.exhaustive)], ids=["for all", "for nobody"], scope="class"
)
class TestInTheMiddleOfARound:
    def test_a_killed_rank_changes_no_bit(self, run: Run, more: str, undisturbed: dict[str, str]) -> None:
        run.describe(TEXT.format(more=more))
        launcher, gone = run.launch(), set[int]()
        for kill in range(min(KILLS, 4)):
            _kill(run, 1 - kill % 2, kill, 9 + 9 * kill, gone)
        assert launcher.wait(240) == 0, run.log()
        ended = run.events("incarnation.ended")
        assert [(item["rank"], item["signal"]) for item in ended[:1]] == [(1, signal.SIGKILL)]
        assert ended[0]["restarting"]
        started = run.events("incarnation.started")
        assert started[1]["resumed_from"].startswith("step-")
        assert _digests(run) == undisturbed
        run.assert_nothing_left()

    @pytest.mark.exhaustive
    def test_a_killed_launcher_and_a_stop_change_no_bit(self, run: Run, more: str, undisturbed: dict[str, str]) -> None:
        """Another attempt follows each: after the kill from the newest checkpoint, after the stop from a new one."""
        run.describe(TEXT.format(more=more))
        killed = run.launch()
        _in_a_round(run, 9)
        killed.send_signal(signal.SIGKILL)
        run.assert_nothing_left()
        stopped = run.launch(restart=1)
        _in_a_round(run, 20, attempt=2)
        stopped.send_signal(signal.SIGTERM)
        assert stopped.wait(240) == 75, run.log()
        saved = json.loads((run.attempt(2) / "stopped.json").read_text())
        assert max(run.losses(2)[0]) == saved["step"], "the round was ended first"
        assert run.launch(restart=2).wait(240) == 0, run.log()
        second, third = (run.events("incarnation.started", number)[0]["resumed_from"] for number in (2, 3))
        assert second.startswith("step-")
        assert third == saved["name"] == f"step-{saved['step']}"
        assert min(run.losses(3)[0]) == saved["step"] + 1
        assert _digests(run) == undisturbed
        run.assert_nothing_left()
