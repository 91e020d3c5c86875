"""Test stopping ranks gracefully: requested once, twice, at unusual moments; and ranks that do not stop."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress

import psutil
import pytest

from tests.training.launching import ENDLESS, Run, accident
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGTERM, "signal"), (signal.SIGUSR1, "time_limit")])
def test_a_stop_request_saves_and_exits_with_75(run: Run, number: int, reason: str) -> None:
    launcher = run.fake(steps=ENDLESS)
    run.started()
    launcher.send_signal(number)
    assert launcher.wait(PATIENCE_S) == 75
    assert run.result()["cause"] == "stopped"
    assert json.loads((run.attempt() / "stop-requested").read_text())["reason"] == reason
    (event,) = run.events("stop.requested")
    assert event["reason"] == reason
    step = json.loads((run.attempt() / "stopped.json").read_text())["step"]
    assert (run.path / "job" / "checkpoints" / f"step-{step}" / "COMMITTED").exists()
    assert max(run.losses()[0]) == step
    run.assert_nothing_left()


def test_a_cancelled_job_reports_the_cancellation(run: Run) -> None:
    launcher = run.fake(steps=ENDLESS)
    run.started()
    (run.path / "portal" / "cancelled").touch()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 75
    assert run.events("stop.requested")[0]["reason"] == "cancel"


def test_a_cancel_is_found_without_a_signal(run: Run) -> None:
    """The batch script, which gets it, may be lost with its node."""
    launcher = run.fake(steps=ENDLESS)
    run.started()
    (run.path / "portal" / "cancelled").touch()
    assert launcher.wait(PATIENCE_S) == 75
    assert run.events("stop.requested")[0]["reason"] == "cancel"


def test_signals_to_everybody_and_twice_change_nothing(run: Run) -> None:
    """scancel and time limits signal the whole job at once, and later again."""
    launcher = run.fake(steps=ENDLESS)
    pids = run.started()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        for process in run.processes():
            with suppress(psutil.NoSuchProcess):  # it may have stopped by now
                if process.pid in pids or process.pid == launcher.pid or "shipper" in " ".join(process.cmdline()):
                    process.send_signal(number)
    assert launcher.wait(PATIENCE_S) == 75
    assert len(run.events("incarnation.started")) == 1
    run.assert_nothing_left()


def test_a_stop_during_start_up_is_heeded(run: Run) -> None:
    launcher = run.fake(steps=ENDLESS, accidents=[accident(0, "start", "phase", phase="start", seconds=1)])
    until(lambda: (run.attempt() / "heartbeat" / "0.0").exists())
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 75
    run.assert_nothing_left()


def test_a_stop_before_anything_started_starts_nothing(run: Run) -> None:
    """No checkpoint is committed, so the job should not return; with one from before, it should."""
    run.describe('kind = "distributed"\n[launch]\nnodes = 2\n')
    waiting = run.launch(json.dumps({"steps": 5}), nodes=2)  # its other node never comes
    until(lambda: list((run.attempt() / "members").glob("node-0.*")))
    waiting.send_signal(signal.SIGUSR1)
    assert waiting.wait(PATIENCE_S) == 143
    assert (run.result()["cause"], run.result()["asked"]) == ("stopped", "time_limit")
    assert run.events("incarnation.started") == []
    run.assert_nothing_left()


def test_what_was_chosen_is_gone_on_from_though_a_stop_came_first(run: Run) -> None:
    """The job is preempted while nodes are missing, and Slurm starts it again."""
    assert run.fake(ranks=1, steps=20, checkpoint_every=10).wait(PATIENCE_S) == 0
    run.describe('kind = "distributed"\n[launch]\nnodes = 2\n', attempt=2, resume="step-10")
    waiting = run.launch(json.dumps({"steps": 30}), job="101", nodes=2)  # its other node never comes
    until(lambda: list((run.attempt(2) / "members").glob("node-0.*")))
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(PATIENCE_S) == 75
    run.describe('kind = "distributed"\n[launch]\n')
    again = run.launch(json.dumps({"steps": 30}), job="101", restart=1)
    assert again.wait(PATIENCE_S) == 0
    assert [event["resumed_from"] for event in run.events("incarnation.started", 3)] == ["step-10"]


def test_a_stop_during_validation_waits_for_the_boundary(run: Run) -> None:
    slow = accident(1, 10, "phase", phase="validate", seconds=1.5)
    launcher = run.fake(steps=ENDLESS, accidents=[slow])
    run.started()
    until(lambda: '"validate"' in (run.attempt() / "heartbeat" / "0.1").read_text())
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 75
    assert max(run.losses()[0]) == 11


def test_ranks_that_do_not_stop_are_killed_after_grace_with_their_stacks(run: Run) -> None:
    launcher = run.fake(steps=ENDLESS, launch="grace_seconds = 1.0\n", accidents=[accident(1, 10, "hang")])
    until(lambda: len(run.started()) == 2 and '"step":10' in (run.attempt() / "heartbeat" / "0.1").read_text())
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 137
    assert (run.result()["cause"], run.result()["asked"]) == ("stop_timeout", "signal")
    assert "in do" in (run.attempt() / "stacks" / "0.1.txt").read_text()
    assert "in meet" in (run.attempt() / "stacks" / "0.0.txt").read_text()
    run.assert_nothing_left()


def test_what_is_saved_is_stopped_though_a_rank_outstays_the_grace(run: Run) -> None:
    launcher = run.fake(steps=ENDLESS, launch="grace_seconds = 1.0\n", accidents=[accident(1, "end", "hang")])
    run.started()
    (run.attempt() / "regroup-0").touch()  # the ranks save at once; so it takes as long as it may
    until(lambda: (run.attempt() / "stopped.json").exists())
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 75
    assert run.result()["cause"] == "stopped"
    assert "in do" in (run.attempt() / "stacks" / "0.1.txt").read_text(), "its stacks show why it stayed"
    run.assert_nothing_left()


def test_a_rank_that_dies_while_stopping_is_not_restarted(run: Run) -> None:
    slow = [accident(0, 10, "phase", phase="save", seconds=1), accident(1, 10, "hang")]
    launcher = run.fake(steps=ENDLESS, accidents=slow)
    pids = run.started()
    until(lambda: '"save"' in (run.attempt() / "heartbeat" / "0.0").read_text())
    launcher.send_signal(signal.SIGTERM)
    until(lambda: (run.attempt() / "stop-requested").exists())
    os.kill(pids[1], signal.SIGKILL)
    assert launcher.wait(PATIENCE_S) == 137
    assert len(run.events("incarnation.started")) == 1


def test_a_requeued_job_goes_on_as_the_next_attempt(run: Run) -> None:
    launcher = run.fake(steps=ENDLESS)
    run.started()
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(PATIENCE_S) == 75
    step = max(run.losses()[0])
    again = run.launch(json.dumps({"steps": step + 10}), restart=1)
    assert again.wait(PATIENCE_S) == 0
    assert sorted(run.losses(2)[0]) == list(range(step + 1, step + 11))
    assert run.events("incarnation.started", 2)[0]["resumed_from"] == f"step-{step}"
