"""Test spare nodes: they stand by, and replace a lost or faulty node at the cost of one incarnation."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.launching import ENDLESS, Run
from tests.waiting import PATIENCE_S, until
from training.launch.attempt import Attempt
from training.launch.failures import FailureKind, RankFailure, classify_exit
from training.launch.incarnation import Ending, Incarnation
from training.launch.leader import Leader
from training.launch.members import Members
from training.launch.plan import LaunchPlan
from training.launch.stop import Regroup
from training.reporting.reporter import NullReporter

BROKEN = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"


class Launchers:
    """Launchers of two nodes and of some spares, without ranks: the test reads their next decision."""

    def __init__(self, folder: Path, *, spares: int) -> None:
        for name in ("members", "job"):
            (folder / name).mkdir()
        count = 2 + spares
        plan = LaunchPlan(
            run_dir=folder, scheduler_id="1", restart_count=0, node="", nodes=count, min_nodes=2, max_nodes=2,
            spares=spares, in_place=10,
        )  # fmt: skip
        plans = [replace(plan, node=f"dgx0{node + 1}", node_rank=node) for node in range(count)]
        self.members = [Members(folder / "members", item) for item in plans]
        for member in self.members:
            member.refresh()
        for member in self.members:
            until(lambda: all(member.is_proven_live(other.me) for other in self.members))  # noqa: B023
        self._leading = [self._lead(folder, plan, item) for plan, item in zip(plans, self.members, strict=True)]
        self.result: dict[str, Any] = {}
        self.now = self._decided(None)

    def _lead(self, folder: Path, plan: LaunchPlan, members: Members) -> Leader:
        stop: Any = SimpleNamespace(reason="", saved=False)
        reporter: Any = NullReporter()
        return Leader(
            plan, Attempt(folder, 1), members, stop=stop, regroup=Regroup(folder), reporter=reporter, log=print
        )

    def _decided(self, last: Incarnation | None) -> Incarnation | None:
        """Return the leader's decision about who leads next; None, and the result, if it is the end."""
        (leading,) = [item for item in range(len(self.members)) if self.members[item].leads(last)]
        self._leading[leading].decide(last)
        turn = self.members[0].decision(last.number + 1 if last else 0)
        if isinstance(turn, Ending):
            self.result = dict(turn.result)
        return turn if isinstance(turn, Incarnation) else None

    @property
    def nodes(self) -> list[str]:
        return self.now.names if self.now else []

    def fail(self, node: int, kind: FailureKind = "signal") -> list[str]:
        """The nodes that go on once the rank on this one has failed, the first of them the leading one."""
        assert self.now
        for place, member in enumerate(self.now.members):
            failures = [RankFailure(place, kind, 1, error="it failed")] if member.node == node else []
            self.members[member.node].report_ended(self.now.number, failures)
        self.now = self._decided(self.now)
        return self.nodes


def test_whoever_was_to_blame_comes_after_who_never_was(tmp_path: Path) -> None:
    """And of those that all were whoever it is longest ago for, whichever of them leads."""
    launchers = Launchers(tmp_path, spares=2)
    assert launchers.nodes == ["dgx01", "dgx02"]
    assert launchers.fail(0) == ["dgx02", "dgx03"]
    assert launchers.fail(2, "address_in_use") == ["dgx02", "dgx03"], "that is no node's doing"
    assert launchers.fail(1, "hang") == ["dgx03", "dgx04"], "a fresh one, not the first that was"
    assert launchers.fail(3, "gpu") == ["dgx03", "dgx01"]
    assert launchers.fail(2) == ["dgx01", "dgx02"]
    assert launchers.fail(0) == ["dgx02", "dgx04"]


def test_without_spares_the_faulty_node_continues(tmp_path: Path) -> None:
    launchers = Launchers(tmp_path, spares=0)
    assert launchers.fail(0) == ["dgx01", "dgx02"]
    assert launchers.fail(1, "gpu") == [], "a restart there would not help"
    assert (launchers.result["cause"], launchers.result["first_failure"]["kind"]) == ("failed", "gpu")


def test_an_exception_of_the_program_still_ends_the_attempt(tmp_path: Path) -> None:
    launchers = Launchers(tmp_path, spares=1)
    assert launchers.fail(1, "exception") == []
    assert launchers.result["first_failure"]["kind"] == "exception"


@pytest.mark.slow
def test_a_spare_node_takes_the_place_of_each_that_fails(run: Run) -> None:
    """Spares replace a node with a broken GPU, a node with a killed rank, and a lost node, also if it leads."""
    run.describe('kind = "distributed"\n[launch]\nnodes = 2\nspares = 2\nranks_per_node = 1\n')
    accidents = [{"rank": 1, "step": 300, "do": "say", "error": BROKEN}]
    body = json.dumps({"steps": ENDLESS, "checkpoint_every": 20, "accidents": accidents})
    launchers = [run.launch(body, node=node, nodes=4) for node in range(4)]
    assert _started(run, 0) == ["dgx01", "dgx02"]
    assert _started(run, 1) == ["dgx01", "dgx03"]
    (ended,) = run.events("incarnation.ended")
    assert (ended["failure"], ended["restarting"], ended["error"]) == ("gpu", True, BROKEN)
    os.kill(run.started(incarnation=1)[0], signal.SIGKILL)
    assert _started(run, 2) == ["dgx03", "dgx04"]
    launchers[2].kill()
    launchers[2].wait(10)
    assert _started(run, 3)[0] == "dgx04", "and whomever it, which had only stood by, first knows to live"
    launchers[3].send_signal(signal.SIGTERM)
    assert {launcher.wait(PATIENCE_S) for launcher in launchers if launcher.returncode is None} == {75}
    run.assert_nothing_left()


def _started(run: Run, incarnation: int) -> list[str]:
    """The nodes that this incarnation runs on, once it does."""
    until(lambda: len(run.events("incarnation.started")) > incarnation)
    event = run.events("incarnation.started")[incarnation]
    run.started(incarnation=incarnation)
    assert event["world_size"] == 2
    nodes: list[str] = event["nodes"]
    return nodes


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BROKEN, "gpu"),
        ("RuntimeError: CUDA error: unspecified launch failure", "gpu"),
        ("torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "gpu"),
        ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable", "gpu"),
        ("RuntimeError: CUDA error: no CUDA-capable device is detected", "gpu"),
        ("RuntimeError: No CUDA GPUs are available", "exception"),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", "exception"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "exception"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "exception"),
    ],
)
def test_what_is_a_gpus_fault(tmp_path: Any, error: str, kind: str) -> None:
    log = tmp_path / "0.0.log"
    log.write_text(f"Traceback (most recent call last):\n{error}\n")
    assert classify_exit(0, 1, None, log, order=0).kind == kind
