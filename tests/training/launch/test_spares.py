"""Spare nodes: they stand by, and take the place of one that is lost or to blame, at the cost of one incarnation."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.training.launching import ENDLESS, Run
from tests.waiting import PATIENCE_S, until
from training.launch.failures import failure_of

pytestmark = pytest.mark.slow
BROKEN = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"


class Spared:
    """Launchers of two nodes and one that stands by, with fake ranks, one a node."""

    def __init__(self, run: Run, **told: Any) -> None:
        self.run, self.nodes = run, 3
        run.describe('kind = "distributed"\n[launch]\nnodes = 2\nspares = 1\nranks_per_node = 1\n')
        self.told = json.dumps({"steps": ENDLESS, "checkpoint_every": 20, **told})
        self.launchers = [run.launch(self.told, node=node, nodes=3) for node in range(3)]

    def started(self, incarnation: int) -> list[str]:
        """The nodes that this incarnation runs on, once it does."""
        until(lambda: len(self.run.events("incarnation.started")) > incarnation)
        event = self.run.events("incarnation.started")[incarnation]
        self.run.started(incarnation=incarnation, ranks=2)
        assert event["world_size"] == 2
        nodes: list[str] = event["nodes"]
        return nodes

    def ready(self) -> None:
        """Has saved, and its leader has seen that the spare one lives."""
        until(lambda: any((self.run.path / "job" / "checkpoints").glob("step-*")))
        until(lambda: max(self.run.losses(rank=0)[0], default=0) > 200)

    def stop(self) -> None:
        next(one for one in self.launchers if one.poll() is None).send_signal(signal.SIGTERM)
        assert {one.wait(PATIENCE_S) for one in self.launchers if one.returncode is None} == {75}
        self.run.assert_nothing_left()


@pytest.mark.parametrize("lost", [1, 0], ids=["another", "the leading one"])
def test_takes_the_place_of_a_lost_node(run: Run, lost: int) -> None:
    job = Spared(run)
    assert job.started(0) == ["dgx01", "dgx02"]
    job.ready()
    job.launchers[lost].kill()
    job.launchers[lost].wait(10)
    assert sorted(job.started(1)) == sorted({"dgx01", "dgx02", "dgx03"} - {f"dgx0{lost + 1}"})
    job.stop()


@pytest.mark.parametrize("blamed", [1, 0], ids=["another", "the leading one"])
def test_takes_the_place_of_one_whose_rank_was_killed(run: Run, blamed: int) -> None:
    """That node's launcher lives on and stands by in its turn, also where it leads."""
    job = Spared(run)
    job.started(0)
    job.ready()
    os.kill(run.started(incarnation=0)[blamed], signal.SIGKILL)
    assert sorted(job.started(1)) == sorted({"dgx01", "dgx02", "dgx03"} - {f"dgx0{blamed + 1}"})
    os.kill(run.started(incarnation=1)[0], signal.SIGKILL)
    assert f"dgx0{blamed + 1}" in job.started(2), "none but it is left"
    job.stop()


def test_takes_the_place_of_one_with_a_broken_gpu(run: Run) -> None:
    """Without a node to spare the same ends the attempt: starting anew there would not help."""
    broken = {"rank": 1, "step": 300, "do": "say", "error": BROKEN}
    job = Spared(run, accidents=[broken])
    job.started(0)
    assert job.started(1) == ["dgx01", "dgx03"]
    (ended,) = run.events("incarnation.ended")
    assert (ended["failure"], ended["restarting"], ended["error"]) == ("gpu", True, BROKEN)
    job.stop()


def test_an_exception_of_the_program_still_ends_the_attempt(run: Run) -> None:
    job = Spared(run, accidents=[{"rank": 1, "step": 300, "do": "raise"}])
    assert {one.wait(PATIENCE_S) for one in job.launchers} == {1}
    assert run.result()["first_failure"]["kind"] == "exception"


def test_without_one_to_spare_a_broken_gpu_ends_the_attempt(run: Run) -> None:
    broken = {"rank": 1, "step": 12, "do": "say", "error": BROKEN}
    assert run.fake(steps=40, accidents=[broken]).wait(PATIENCE_S) == 1
    assert run.result()["first_failure"]["kind"] == "gpu"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BROKEN, "gpu"),
        ("RuntimeError: CUDA error: unspecified launch failure", "gpu"),
        ("RuntimeError: No CUDA GPUs are available", "exception"),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", "exception"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "exception"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "exception"),
    ],
)
def test_what_is_a_gpus_fault(tmp_path: Any, error: str, kind: str) -> None:
    log = tmp_path / "0.0.log"
    log.write_text(f"Traceback (most recent call last):\n{error}\n")
    assert failure_of(0, 1, None, log, order=0).kind == kind
