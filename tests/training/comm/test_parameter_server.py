"""Test the parameter server: how far ahead a worker may be, and that such a run learns, stops and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.ranks import TINY, Run
from tests.waiting import until
from training.comm._server import ParameterServer


def _server(staleness: int, workers: int = 3) -> tuple[ParameterServer, list[int]]:
    applied: list[int] = []
    server = ParameterServer(
        workers, staleness, model=lambda: [torch.zeros(4)], apply=lambda step, _: applied.append(step)
    )
    return server, applied


def _step(server: ParameterServer, worker: int, step: int) -> bool:
    """Return whether the worker may take the step, and take it."""
    future = server.pull(worker, step)
    if not future.done():
        return False
    if future.wait() is not None:
        server.push(worker, step, [torch.ones(4)], loss=float(step))
    return True


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_slow_worker_makes_the_fast_ones_wait_at_the_bound(staleness: int) -> None:
    server, applied = _server(staleness)
    server.open(0, 100)
    for fast in (0, 1):
        for step in range(staleness + 1):
            assert _step(server, fast, step)
    waiting = [server.pull(fast, staleness + 1) for fast in (0, 1)]
    assert not any(future.done() for future in waiting), "worker 2 has finished none"
    assert _step(server, 2, 0)
    assert all(future.done() for future in waiting), "as soon as it has finished one"
    assert server.max_staleness == staleness
    assert applied == [*range(staleness + 1), *range(staleness + 1), 0], "each at once, as it comes"


def test_a_stretch_ends_at_the_same_step_for_all() -> None:
    server, _ = _server(3)
    server.open(10, 12)
    for worker in range(3):
        assert _step(server, worker, 10)
        assert _step(server, worker, 11)
    early = server.pull(0, 12)
    assert not early.done(), "requested before the next stretch is open"
    assert server.progress(0) == (12, True, {10: 10.0, 11: 11.0})
    server.open(12, 14)
    assert early.done()
    assert early.wait() is not None


def test_a_stop_lets_all_finish_the_step_that_somebody_has_begun() -> None:
    server, _ = _server(4)
    server.open(0, 100)
    for step in range(3):
        assert _step(server, 0, step)
    server.close()
    assert server.pull(0, 3).wait() is None
    for worker in (1, 2):
        for step in range(3):
            assert _step(server, worker, step)
        assert server.pull(worker, 3).wait() is None
    assert server.progress(0)[:2] == (3, True)
    assert server.sent_bytes == 9 * 4 * 4


def test_gradients_reach_the_model_between_two_copies() -> None:
    model = torch.zeros(2)

    def apply(_: int, gradients: object) -> None:
        assert isinstance(gradients, list)
        model.sub_(gradients[0])

    server = ParameterServer(1, 0, model=lambda: [model.clone()], apply=apply)
    server.open(0, 2)
    first: list[Tensor] = server.pull(0, 0).wait()
    server.push(0, 0, [torch.ones(2)], 1.0)
    second: list[Tensor] = server.pull(0, 1).wait()
    assert (first[0].tolist(), second[0].tolist()) == ([0, 0], [-1, -1])


@pytest.mark.slow
def test_a_run_learns_within_the_bound_and_goes_on(tmp_path: Path) -> None:
    settings = {**TINY, "communication": "parameter_server", "parameter_server": {"staleness": 2}, "steps": 40}
    run = Run(tmp_path / "run", settings)
    run.finish(3)
    losses = run.series()
    assert sorted(losses) == list(range(1, 41))
    assert not run.events("run.verdict"), "its steps have no parts to be measured"
    assert sum(losses[step] for step in range(36, 41)) < 0.9 * sum(losses[step] for step in range(1, 6))
    assert max(run.series("staleness").values()) <= 2
    assert sorted(run.series(rank=2)) == list(range(1, 41)), "each worker takes part in every step"
    parameters = run.events("run.started")[0]["parameters"]
    assert run.series("communicated_mib", 1)[1] == pytest.approx(4 * parameters / 2**20)
    assert sum(run.series("communicated_mib").values()) == pytest.approx(40 * 2 * 4 * parameters / 2**20)

    assert [found.step for found in run.checkpoints][-1] == 40
    run.write(steps=100_000)
    endless = run.start(2, resume="step-40")
    until(lambda: len(run.series()) > 60)
    (endless.attempt_dir / "stop-requested").write_text('{"reason": "cancel"}')
    assert endless.wait() == [0, 0], endless.output()
    (saved,) = run.events("stop.saved")
    assert run.checkpoints[-1].step == saved["step"] > 40
    assert run.events("run.started")[0]["start_step"] == 40

    refused = run.start(1, resume="step-40")
    assert refused.wait() == [1]
    assert "run.communication: needs a server and at least one worker" in refused.output()
