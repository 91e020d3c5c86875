"""Test the launcher with the real trainer: killed, stopped, hung in a real collective; its losses stay the same."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress

import psutil
import pytest

from tests.training.launching import Run
from tests.waiting import until
from training.attempt.heartbeat import heartbeat_path, read_beat

pytestmark = pytest.mark.slow

TINY = """
kind = "distributed"
[launch]
ranks_per_node = 2
grace_seconds = 60
{launch}
[run]
recipe = "language"
steps = {steps}
global_batch = 8
learning_rate = 1e-2
warmup_steps = 2
validate_every = 0
checkpoint_every = {every}
flush_steps = 1
[run.language]
layers = 1
heads = 2
head_width = 8
context = 16
dropout = 0.2
"""


def _describe(run: Run, *, steps: int, every: int = 10, launch: str = "") -> None:
    run.describe(TINY.format(steps=steps, every=every, launch=launch))


def _line_of_record(run: Run, attempts: int = 1, rank: int = 0) -> dict[int, float]:
    """Return each step's loss by the newest incarnation of the newest attempt."""
    record: dict[int, float] = {}
    for number in range(1, attempts + 1):
        for _, losses in sorted(run.losses(number, rank).items()):
            record |= losses
    return record


def _rank(run: Run, rank: int, *, gone: frozenset[int] = frozenset()) -> psutil.Process:
    def found() -> psutil.Process | None:
        for process in run.processes():
            with suppress(psutil.NoSuchProcess):
                if process.pid not in gone and process.environ().get("RANK") == str(rank):
                    return process
        return None

    process = until(found)
    assert isinstance(process, psutil.Process)
    return process


def _reaches(run: Run, step: int, incarnation: int = 0) -> None:
    path = heartbeat_path(run.attempt(), rank=1, incarnation=incarnation)
    until(lambda: (beat := read_beat(path)) and beat.step >= step)


def _last(run: Run, incarnation: int) -> int:
    """The newest step that this incarnation has reported."""
    return max(run.losses().get(incarnation, {}), default=0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nobody touched."""
    run = Run(tmp_path_factory.mktemp("undisturbed") / "run")
    try:
        _describe(run, steps=400, every=50)
        assert run.launch().wait(240) == 0
        record = _line_of_record(run)
    finally:
        run.end()
    assert sorted(record) == list(range(1, 401))
    return record


def test_a_killed_rank_and_a_requeue_change_no_loss(run: Run, undisturbed: dict[int, float]) -> None:
    """kill -9 of one rank mid-run, recovered in place; then a stop and a requeue; float for float the same."""
    _describe(run, steps=400, every=50)
    launcher = run.launch()
    _reaches(run, 60)
    _rank(run, 1).send_signal(signal.SIGKILL)
    _reaches(run, 110, incarnation=1)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(120) == 75
    assert run.launch(restart=1).wait(240) == 0
    first = run.events("incarnation.ended")[0]
    assert (first["rank"], first["signal"], first["restarting"]) == (1, signal.SIGKILL, True)
    assert _line_of_record(run, attempts=2) == undisturbed
    assert {path.name for path in run.attempt(2).glob("logs/*.log")} >= {"0.0.log", "0.1.log"}
    run.assert_nothing_left()


def test_a_rank_that_stops_responding_is_named_by_its_collectives(run: Run) -> None:
    """It stops on the other of two nodes, at the same step; the flight recorders show which did not get as far.

    Both nodes leave what they can, also the one that does not lead; training continues from the newest checkpoint.
    """
    launch = "nodes = 2\n[launch.watchdog]\nstep = 2.0\ndata = 20.0\nsave = 20.0\n"  # wherever it stops
    text = TINY.format(steps=100_000, every=20, launch=launch).replace("ranks_per_node = 2", "ranks_per_node = 1")
    run.describe(text)
    launchers = [run.launch(node=node, nodes=2) for node in (0, 1)]
    _reaches(run, 50)
    _rank(run, 0).send_signal(signal.SIGSTOP)
    until(lambda: run.events("incarnation.ended"))
    ended = run.events("incarnation.ended")[0]
    assert (ended["rank"], ended["failure"], ended["why"]) == (0, "hang", "hang")
    record = json.loads((run.attempt() / "flight" / "0.1.json").read_text())
    assert any("all_reduce" in entry["profiling_name"] for entry in record["entries"])
    assert "trainer.py" in (run.attempt() / "stacks" / "0.1.txt").read_text()
    started = until(lambda: run.events("incarnation.started")[1:])[0]
    assert started["resumed_from"].startswith("step-")
    _reaches(run, int(started["resumed_from"].removeprefix("step-")) + 1, incarnation=1)
    launchers[1].send_signal(signal.SIGTERM)
    assert [launcher.wait(120) for launcher in launchers] == [75, 75]
    run.assert_nothing_left()


def test_term_while_starting_up_still_saves(run: Run) -> None:
    """The ranks are importing torch: they ignore TERM from their first instruction, and stop at the first boundary."""
    _describe(run, steps=100_000)
    launcher = run.launch()
    for rank in (0, 1):
        _rank(run, rank).send_signal(signal.SIGTERM)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(120) == 75
    assert len(run.events("incarnation.started")) == 1
    assert json.loads((run.attempt() / "stopped.json").read_text())["name"] in os.listdir(
        run.path / "job" / "checkpoints"
    )
    run.assert_nothing_left()


def test_a_wrong_configuration_ends_at_once(run: Run) -> None:
    run.describe(TINY.format(steps=10, every=0, launch="").replace("global_batch = 8", "global_batch = 7"))
    assert run.launch().wait(120) != 0
    assert len(run.events("incarnation.started")) == 1
    assert "global_batch" in json.dumps(run.result()["first_failure"])
    run.assert_nothing_left()


def test_a_checkpoint_with_changed_bytes_is_skipped(run: Run) -> None:
    """Nobody is there at night to choose the previous checkpoint; but a person's choice is not replaced."""
    _describe(run, steps=20)
    assert run.launch().wait(120) == 0
    shard = next((run.path / "job" / "checkpoints" / "step-20").glob("*.distcp"))
    shard.write_bytes(bytes(255 - byte for byte in shard.read_bytes()))
    run.describe(TINY.format(steps=30, every=10, launch=""), attempt=2, resume="step-20")
    assert run.launch(restart=1).wait(120) == 1
    assert [event["resumed_from"] for event in run.events("incarnation.started", 2)] == ["step-20"]
    assert "step-20 can't be resumed from" in run.result(2)["error"]
    (shard.parent / "DAMAGED").unlink()
    _describe(run, steps=30)
    assert run.launch(restart=2).wait(120) == 0
    assert [event["resumed_from"] for event in run.events("incarnation.started", 3)] == ["step-20", "step-10"]
    assert {(report["step"], report["generation"]) for report in run.events("checkpoint.damaged", 3)} == {(20, 1)}
    run.assert_nothing_left()


@pytest.mark.exhaustive
def test_two_nodes_train_together(run: Run) -> None:
    """Two launchers with one rank each on loopback; a rank of the second is killed on the way."""
    text = TINY.format(steps=60, every=10, launch="nodes = 2")
    run.describe(text.replace("ranks_per_node = 2", "ranks_per_node = 1"))
    launchers = [run.launch(node=node, nodes=2) for node in (0, 1)]
    _reaches(run, 25)
    _rank(run, 1).send_signal(signal.SIGKILL)
    assert [launcher.wait(240) for launcher in launchers] == [0, 0]
    assert sorted(_line_of_record(run)) == list(range(1, 61))
    assert run.events("incarnation.ended")[0]["rank"] == 1
    run.assert_nothing_left()


def test_a_run_continues_on_a_single_node_of_three_and_grows_again(run: Run) -> None:
    """The batch of 8 divides over neither three ranks nor, evenly, over two: the same samples in uneven shares.

    Whoever leads is killed; then the newest comes back. What it computes stays the same.
    """
    launch = "nodes = 1\nmax_nodes = 4\ngrow_seconds = 0"
    text = TINY.format(steps=100_000, every=10, launch=launch).replace("ranks_per_node = 2", "ranks_per_node = 1")
    run.describe(text.replace("dropout = 0.2", "dropout = 0.0"))  # what is dropped depends on the shares
    launchers = [run.launch(node=node, nodes=3) for node in range(3)]
    _reaches(run, 25)
    launchers[0].send_signal(signal.SIGKILL)
    until(lambda: _last(run, 1) > 40)
    launchers[1].send_signal(signal.SIGKILL)
    until(lambda: _last(run, 2) > 60)
    run.launch(node=0, nodes=3)
    until(lambda: _last(run, 3) > _last(run, 2))
    launchers[2].send_signal(signal.SIGTERM)
    assert launchers[2].wait(120) == 75
    worlds = [event["world_size"] for event in run.events("incarnation.started")]
    assert worlds == [3, 2, 1, 2]
    assert [event["why"] for event in run.events("incarnation.ended")] == ["node", "node", "joined", "stopped"]
    micro = {event["micro_batch"] for event in run.events("run.started")}
    assert micro == {2}  # as on four: memory does not grow
    record = _line_of_record(run)
    assert sorted(record) == list(range(1, max(record) + 1))
    norms = run.series("gradient_norm")  # of the whole batch, whoever had which part of it
    for earlier, later in ((0, 1), (1, 2)):
        both = norms[earlier].keys() & norms[later].keys()
        assert both
        assert {step: norms[later][step] for step in both} == pytest.approx(
            {step: norms[earlier][step] for step in both}, rel=1e-3
        )
    run.assert_nothing_left()
