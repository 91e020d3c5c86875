"""Test elastic jobs: they continue on the remaining nodes, whichever leads, and admit nodes that join."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import psutil
import pytest

from tests.training.launching import ENDLESS, KILLS, Run
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow
GRACE_S = 30.0  # the time that ranks get after a stop request


class Elastic:
    """Launchers of "min:max" nodes with fake ranks, one per node."""

    def __init__(self, run: Run, *, least: int = 1, nodes: int = 2, launch: str = "", **options: Any) -> None:
        self.run, self.nodes = run, nodes
        self.options = json.dumps({"steps": ENDLESS, "checkpoint_every": 20, **options})
        run.describe(
            f'kind = "distributed"\n[launch]\nnodes = {least}\nmax_nodes = {nodes}\nranks_per_node = 1\n{launch}'
        )
        self.launchers = [self.launch(node) for node in range(nodes)]

    def launch(self, node: int) -> subprocess.Popen[bytes]:
        return self.run.launch(self.options, node=node, nodes=self.nodes)

    def kill(self, node: int) -> None:
        self.launchers[node].send_signal(signal.SIGKILL)
        self.launchers[node].wait(10)

    def started(self, incarnation: int) -> dict[str, Any]:
        found = until(
            lambda: [item for item in self.run.events("incarnation.started") if item["incarnation"] == incarnation]
        )
        event: dict[str, Any] = found[0]
        self.run.started(incarnation=incarnation, ranks=event["world_size"])
        return event

    def stop(self, by: int) -> list[int]:
        """The exit codes of all that were not killed."""
        self.launchers[by].send_signal(signal.SIGTERM)
        codes = [launcher.wait(PATIENCE_S) for launcher in self.launchers if launcher.returncode is None]
        self.run.assert_nothing_left()
        return codes


def _committed(run: Run) -> bool:
    return any((run.path / "job" / "checkpoints").glob("step-*"))


def _steps(run: Run) -> list[int]:
    """Return every step that any incarnation has reported, of rank 0."""
    return sorted(set().union(*run.losses().values()))


@pytest.mark.parametrize("lost", [1, 0], ids=["another", "the leading one"])
def test_a_lost_node_is_done_without(run: Run, lost: int) -> None:
    """No process waits for it; its ranks are gone with it, and the numbers of the others close up."""
    job = Elastic(run)
    job.started(0)
    until(lambda: _committed(run))
    job.kill(lost)
    started = job.started(1)
    assert (started["world_size"], started["nodes"]) == (1, [f"dgx0{2 - lost}"])
    assert started["resumed_from"].startswith("step-")
    (gone,) = run.events("nodes.lost")
    assert (gone["nodes"], gone["left"], gone["needed"]) == ([f"dgx0{lost + 1}"], 1, 1)
    (ended,) = run.events("incarnation.ended")
    assert (ended["why"], ended["restarting"], ended["rank"], ended["nodes"]) == ("node", True, lost, 2)
    assert started["time"] - gone["time"] < GRACE_S, "the lost node's rank was waited for"
    assert job.stop(1 - lost) == [75]
    last = max(_steps(run))
    assert _steps(run) == list(range(1, last + 1))
    assert run.result()["cause"] == "stopped"


def test_whoever_is_killed_in_turn_training_goes_on(run: Run) -> None:
    """Kill rank, launcher and leading launcher as often as requested; what was lost comes back in between."""
    job = Elastic(run, launch="grow_seconds = 0.0\n", step_seconds=0.002)
    incarnation = 0
    for kill in range(KILLS):
        for what in ("rank", "launcher", "leading launcher"):
            started = job.started(incarnation)
            leading = int(started["nodes"][0][-1]) - 1
            before = len(_names(run))
            until(lambda: len(_names(run)) > before)  # noqa: B023
            if what == "rank":
                os.kill(run.started(incarnation=incarnation)[kill % 2], signal.SIGKILL)
                incarnation += 1
                continue
            node = leading if what == "leading launcher" else 1 - leading
            job.kill(node)
            assert job.started(incarnation + 1)["world_size"] == 1
            job.launchers[node] = job.launch(node)
            assert job.started(incarnation + 2)["world_size"] == 2
            incarnation += 2
    job.started(incarnation)
    assert job.stop(0) == [75, 75]
    assert _steps(run) == list(range(1, max(_steps(run)) + 1))
    assert len(run.events("nodes.joined")) == len(run.events("nodes.lost")) == 2 * KILLS
    whys = [event["why"] for event in run.events("incarnation.ended")]
    assert whys == ["signal", *["node", "joined"] * 2] * KILLS + ["stopped"]


def _names(run: Run) -> set[str]:
    return {path.name for path in (run.path / "job" / "checkpoints").glob("step-*")}


def test_a_leader_that_was_only_paused_ends_its_ranks_and_stands_by(run: Run) -> None:
    """It is thought dead and done without; when it goes on it neither leads nor writes, and is taken in again."""
    job = Elastic(run, launch="grow_seconds = 1.0\n")
    ranks = job.started(0) and run.started()
    until(run.losses)
    paused = [psutil.Process(job.launchers[0].pid), psutil.Process(ranks[0])]
    for process in paused:
        process.suspend()
    assert job.started(1)["nodes"] == ["dgx02"]
    assert psutil.pid_exists(ranks[0])
    for process in paused:
        process.resume()
    until(lambda: not psutil.pid_exists(ranks[0]))
    started = job.started(2)
    assert started["nodes"] == ["dgx02", "dgx01"]
    assert run.events("nodes.joined")[0]["nodes"] == ["dgx01"]
    assert max(run.losses(rank=0)[0]) <= min(run.losses(rank=0)[1]) + 20
    assert job.stop(0) == [75, 75]


def test_with_too_few_nodes_it_waits_and_then_requests_a_requeue(run: Run) -> None:
    """Exit code 75: something was committed, so the scheduler may queue it again at once."""
    job = Elastic(run, least=2, nodes=3, launch="return_seconds = 2.0\n")
    job.started(0)
    until(lambda: _committed(run))
    job.kill(1)
    assert job.started(1)["nodes"] == ["dgx01", "dgx03"]
    job.kill(0)
    assert job.launchers[2].wait(PATIENCE_S) == 75
    result = run.result()
    assert result["cause"] == "node"
    assert result["error"].endswith("1 of at least 2 nodes were left and none came back within 2 s")
    assert [event["why"] for event in run.events("incarnation.ended")] == ["node", "node"]
    run.assert_nothing_left()


def test_a_node_that_comes_back_in_time_saves_the_attempt(run: Run) -> None:
    job = Elastic(run, least=2, nodes=3)
    job.started(0)
    job.kill(0)
    job.started(1)
    job.kill(1)
    until(lambda: len(run.events("nodes.lost")) == 2)
    job.launchers[0] = job.launch(0)
    assert job.started(2)["nodes"] == ["dgx03", "dgx01"]
    assert job.stop(2) == [75, 75]


def test_shrinking_counts_against_the_budget_and_growing_does_not(run: Run) -> None:
    job = Elastic(run, launch="grow_seconds = 0.0\nin_place = 1\n", checkpoint_every=1000)
    job.started(0)
    job.kill(1)
    job.started(1)
    job.launchers[1] = job.launch(1)
    job.started(2)  # saved as it ended: the budget is full again
    job.kill(1)
    job.started(3)
    os.kill(run.started(incarnation=3, ranks=1)[0], signal.SIGKILL)
    assert job.launchers[0].wait(PATIENCE_S) == 137
    assert run.result()["first_failure"]["incarnation"] == 3


def test_a_run_begins_with_fewer_nodes_than_requested(run: Run) -> None:
    """A node that never appears is not waited for as long as it is by a job that needs all of them."""
    job = Elastic(run, nodes=1)
    job.run.describe('kind = "distributed"\n[launch]\nnodes = 1\nmax_nodes = 2\ngather_seconds = 1.0\n', attempt=2)
    alone = run.launch(json.dumps({"steps": 5}), restart=1, nodes=2)
    assert alone.wait(PATIENCE_S) == 0
    assert run.events("incarnation.started", 2)[0]["nodes"] == ["dgx01"]
