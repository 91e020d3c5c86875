"""Test two nodes of one job: they complete, restart, fail and stop together."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.training.launching import ENDLESS, Run, accident
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def _two(run: Run, **options: Any) -> tuple[Any, Any]:
    run.describe('kind = "distributed"\n[launch]\nnodes = 2\nranks_per_node = 2\nreturn_seconds = 0.5\n')
    text = json.dumps(options)
    return run.launch(text, nodes=2), run.launch(text, node=1, nodes=2)


def test_two_nodes_complete_together(run: Run) -> None:
    launchers = _two(run, steps=20)
    assert [launcher.wait(PATIENCE_S) for launcher in launchers] == [0, 0]
    assert not run.attempt(2).exists()
    (started,) = run.events("incarnation.started")
    assert started["world_size"] == 4
    for rank in range(4):
        assert sorted(run.losses(rank=rank)[0]) == list(range(1, 21))
    nodes = {path.name.split(".")[1] for path in (run.attempt() / "spool").glob("*.jsonl")}
    assert {"-1", "-2"} <= nodes
    run.assert_nothing_left()


def test_a_rank_lost_on_the_other_node_restarts_both(run: Run) -> None:
    launchers = _two(run, steps=40, checkpoint_every=10, accidents=[accident(3, 25, "kill")])
    assert [launcher.wait(PATIENCE_S) for launcher in launchers] == [0, 0]
    first = run.events("incarnation.ended")[0]
    assert (first["rank"], first["failure"]) == (3, "signal")
    assert sorted(run.losses(rank=3)[1]) == list(range(21, 41))


def test_an_exception_on_the_other_node_ends_both(run: Run) -> None:
    launchers = _two(run, steps=40, accidents=[accident(2, 10, "raise")])
    assert [launcher.wait(PATIENCE_S) for launcher in launchers] == [1, 1]
    assert run.result()["first_failure"]["rank"] == 2


def test_two_nodes_stop_together_whichever_gets_the_signal(run: Run) -> None:
    launchers = _two(run, steps=ENDLESS)
    run.started(ranks=4)
    launchers[1].send_signal(signal.SIGTERM)
    assert [launcher.wait(PATIENCE_S) for launcher in launchers] == [75, 75]
    run.assert_nothing_left()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_launcher_ends_the_other(run: Run, lost: int) -> None:
    launchers = _two(run, steps=ENDLESS)
    run.started(ranks=4)
    launchers[lost].send_signal(signal.SIGKILL)
    assert launchers[1 - lost].wait(PATIENCE_S) != 0
    run.assert_nothing_left()
