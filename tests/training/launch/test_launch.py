"""Test starting, restarting and ending ranks, with fake ones without torch, by real processes and signals."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from tests.training.intake import Server
from tests.training.launching import ENDLESS, Run, accident
from tests.waiting import PATIENCE_S, until
from training.launch.attempt import SUBFOLDERS

pytestmark = pytest.mark.slow


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def test_a_run_completes_and_leaves_its_last_word(run: Run) -> None:
    assert run.fake(steps=20).wait(PATIENCE_S) == 0
    assert run.result() == {"exit_code": 0, "cause": "completed", "asked": "", "error": "", "first_failure": None}
    assert json.loads((run.attempt() / "owner.json").read_text()) == {"scheduler_id": "100", "restart_count": 0}
    (started,) = run.events("incarnation.started")
    assert (started["incarnation"], started["world_size"]) == (0, 2)
    (ended,) = run.events("incarnation.ended")
    assert (ended["exit_code"], ended["rank"]) == (0, None)
    assert sorted(run.losses(rank=1)[0]) == list(range(1, 21))
    run.assert_nothing_left()


def test_what_the_processes_use_is_sampled(run: Run) -> None:
    assert run.fake(steps=60, step_seconds=0.02).wait(PATIENCE_S) == 0
    (path,) = (run.attempt() / "spool").glob("0.-1.*.jsonl")
    from training.reporting.spool import read_spool

    series = [batch.series for batch in read_spool(path)[1]]
    memory = [value for batch in series for _, value in batch.get("memory_gib", [])]
    assert memory
    assert all(0 <= value < 10 for value in memory)
    assert max(memory) > 0.001, "a sample may be of ranks that have only just been made"
    assert any("cpu_cores" in batch for batch in series)


def test_it_is_sampled_where_the_file_servers_clock_is_ahead(run: Run) -> None:
    for part in SUBFOLDERS:
        (run.attempt() / part).mkdir(parents=True)
    owner = run.attempt() / "owner.json"
    owner.write_text('{"scheduler_id": "100", "restart_count": 0}')
    os.utime(owner, (time.time() + 3600,) * 2)
    assert run.fake(steps=60, step_seconds=0.02).wait(PATIENCE_S) == 0
    (samples,) = run.series("memory_gib", rank=-1).values()
    assert samples
    assert max(samples) < 3600


# Restarting in place.


@pytest.mark.parametrize("do", ["kill", "segfault"])
def test_a_lost_rank_restarts_all_from_the_newest_commit(run: Run, do: str) -> None:
    launcher = run.fake(steps=40, checkpoint_every=10, accidents=[accident(1, 25, do)])
    assert launcher.wait(PATIENCE_S) == 0
    assert [event["incarnation"] for event in run.events("incarnation.started")] == [0, 1]
    first, last = run.events("incarnation.ended")
    number = signal.SIGKILL if do == "kill" else signal.SIGSEGV
    assert (first["rank"], first["failure"], first["signal"], first["restarting"]) == (1, "signal", number, True)
    assert last["restarting"] is False
    losses = run.losses()
    assert sorted(losses[1]) == list(range(21, 41))
    assert set(range(1, 21)) <= set(losses[0])
    run.assert_nothing_left()


def test_an_exception_ends_the_attempt_at_once(run: Run) -> None:
    """Even though the other rank, which loses its peer, is noticed too."""
    launcher = run.fake(steps=40, checkpoint_every=5, accidents=[accident(1, 12, "raise")])
    assert launcher.wait(PATIENCE_S) == 1
    first = run.result()["first_failure"]
    assert (first["rank"], first["kind"], first["incarnation"]) == (1, "exception", 0)
    assert first["error"] == "ValueError: the learning rate is a fish"
    assert len(run.events("incarnation.started")) == 1
    run.assert_nothing_left()


def test_the_first_failing_ranks_code_is_the_launchers(run: Run) -> None:
    assert run.fake(steps=40, accidents=[accident(0, 5, "exit", code=42)]).wait(PATIENCE_S) == 42
    assert run.result()["first_failure"]["exit_code"] == 42


@pytest.mark.parametrize("ranks", [1, 2])
def test_exit_code_0_in_the_midst_of_a_run_is_no_success(run: Run, ranks: int) -> None:
    """A user's code may call os._exit(0) within a step."""
    assert run.fake(ranks=ranks, steps=40, accidents=[accident(0, 5, "exit", code=0)]).wait(PATIENCE_S) == 1
    result = run.result()
    assert (result["cause"], result["exit_code"]) == ("failed", 1)
    assert result["error"] == "It left with exit code 0 before its run had ended (step): does its code call os._exit()?"
    assert (result["first_failure"]["rank"], result["first_failure"]["exit_code"]) == (0, 0)
    assert len(run.events("incarnation.started")) == 1


def test_only_the_launcher_requests_a_requeue(run: Run) -> None:
    """A program that ends with 75 each time would else be queued again forever."""
    assert run.fake(steps=40, accidents=[accident(0, 5, "exit", code=75)]).wait(PATIENCE_S) == 1
    assert run.result()["exit_code"] == 1
    assert run.result()["first_failure"]["exit_code"] == 75


def test_restarts_are_counted_and_refilled_by_commits(run: Run) -> None:
    """The budget is one: a loss after a new commit is granted, a second one without it is not."""
    accidents = [accident(0, 10 * n + 5, "kill", incarnation=n) for n in range(4)]
    accidents += [accident(0, 35, "kill", incarnation=4)]
    launcher = run.fake(
        steps=100, launch="in_place = 1\n", checkpoint_every=10, step_seconds=0.001, accidents=accidents
    )
    assert launcher.wait(PATIENCE_S) == 137
    starts = [event["resumed_from"] for event in run.events("incarnation.started")]
    assert starts == ["", "", "step-10", "step-20", "step-30"]


def test_the_budget_of_restarts_ends(run: Run) -> None:
    accidents = [accident(1, 3, "kill", incarnation="any")]
    assert run.fake(steps=20, launch="in_place = 2\n", accidents=accidents).wait(PATIENCE_S) == 137
    assert len(run.events("incarnation.started")) == 3
    assert run.result()["first_failure"]["incarnation"] == 2


def test_a_rank_that_hangs_is_found_and_all_start_again(run: Run) -> None:
    """Its stacks are stored. (Only real collectives show which of two ranks at the same step is to blame.)"""
    launcher = run.fake(
        steps=60,
        checkpoint_every=10,
        step_seconds=0.02,
        launch="[launch.watchdog]\nstep = 1.0\n",
        accidents=[accident(1, 30, "hang")],
    )
    assert launcher.wait(PATIENCE_S) == 0
    (first, _) = run.events("incarnation.ended")
    assert first["failure"] == "hang"
    assert "step at step 30" in first["error"]
    stacks = (run.attempt() / "stacks" / "0.1.txt").read_text()
    assert "in do" in stacks
    assert sorted(run.losses()[1])[0] == 31


def test_a_frozen_process_is_a_hang_too(run: Run) -> None:
    launcher = run.fake(
        steps=40, step_seconds=0.03, launch="[launch.watchdog]\nstep = 1.0\n", accidents=[accident(0, 20, "freeze")]
    )
    assert launcher.wait(PATIENCE_S) == 0
    assert run.events("incarnation.ended")[0]["failure"] == "hang"
    run.assert_nothing_left()


def test_ranks_stuck_in_init_are_killed_and_retried(run: Run) -> None:
    launcher = run.fake(steps=10, launch="[launch.watchdog]\ninit = 0.8\n", accidents=[accident(1, "init", "hang")])
    assert launcher.wait(PATIENCE_S) == 0
    assert run.events("incarnation.ended")[0]["error"].startswith("all 2 ranks are stuck: init at step 0")
    assert len(run.events("incarnation.started")) == 2


def test_slowness_kills_nobody(run: Run) -> None:
    """A long compile, a slow validation and a stalled save of one rank, while the other waits beyond its step limit."""
    slow = [
        accident(0, 0, "phase", phase="compile", seconds=2),
        accident(1, 12, "phase", phase="validate", seconds=2),
        accident(0, 20, "phase", phase="save", seconds=2),
        accident(1, 25, "phase", phase="data", seconds=2),
    ]
    launcher = run.fake(steps=30, step_seconds=0.005, launch="[launch.watchdog]\nstep = 0.5\n", accidents=slow)
    assert launcher.wait(PATIENCE_S) == 0
    assert len(run.events("incarnation.started")) == 1


# Nothing is left, whoever dies.


def test_killing_the_launcher_takes_everything_with_it(run: Run) -> None:
    launcher = run.fake(steps=ENDLESS)
    pids = run.started()
    until(lambda: any("training.shipper" in " ".join(process.cmdline()) for process in run.processes()))
    launcher.send_signal(signal.SIGKILL)
    run.assert_nothing_left()
    assert not {process.pid for process in run.processes()} & set(pids)


def test_a_shipper_that_dies_is_started_again(run: Run) -> None:
    launcher = run.fake(steps=ENDLESS)
    run.started()

    def shipper() -> int | None:
        found = [process.pid for process in run.processes() if "training.shipper" in " ".join(process.cmdline())]
        return found[0] if found else None

    before = until(shipper)
    os.kill(before, signal.SIGKILL)
    until(lambda: (pid := shipper()) and pid != before)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 75
    run.assert_nothing_left()


def test_what_ranks_leave_behind_is_ended(run: Run) -> None:
    """Helpers in separate sessions: the rank of one was killed, that of the other completed."""
    left = [accident(0, 3, "leave"), accident(1, 3, "leave"), accident(1, 5, "kill")]
    launcher = run.fake(steps=20, accidents=left)
    assert launcher.wait(PATIENCE_S) == 0
    run.assert_nothing_left()


def test_an_older_launch_stops_when_a_newer_launch_takes_over(run: Run) -> None:
    older = run.fake(steps=ENDLESS)
    run.started()
    newer = run.launch(json.dumps({"steps": 30}), job="101")
    assert newer.wait(PATIENCE_S) == 0
    assert older.wait(PATIENCE_S) == 1
    assert run.result(1)["cause"] == "fenced"
    assert run.result(2)["cause"] == "completed"
    run.assert_nothing_left()


# All together.


def test_every_report_arrives_once_whatever_is_killed(run: Run, server: Server) -> None:
    """A rank, then the shipper, then the portal for a while: every identity once, every loss of the spools there."""
    server.leave_token(run.path, scheduler_id="100")
    launcher = run.fake(steps=150, step_seconds=0.02, checkpoint_every=20)
    pids = run.started()
    until(lambda: len(server.intake.points) > 20)
    os.kill(pids[1], signal.SIGKILL)
    run.started(incarnation=1)
    shipper = next(process for process in run.processes() if "training.shipper" in " ".join(process.cmdline()))
    shipper.send_signal(signal.SIGKILL)
    until(lambda: any(incarnation == 1 for _, incarnation, _, _, _ in server.intake.identities()))
    server.stop()
    until(lambda: max(run.losses().get(1, {0: 0})) > 100)
    server.start()
    assert launcher.wait(PATIENCE_S) == 0
    identities = server.intake.identities()
    assert len(identities) == len(set(identities))
    for rank in (0, 1):
        for incarnation, losses in run.losses(rank=rank).items():
            arrived = {
                step: value
                for (_, created, by, name, step), value in server.intake.points
                if (created, by, name) == (incarnation, rank, "loss")
            }
            assert arrived == losses
    assert {"incarnation.started", "incarnation.ended", "checkpoint.committed"} <= {
        event["kind"] for event in server.intake.events
    }
    assert sorted(run.losses()[0] | run.losses()[1]) == list(range(1, 151))


def test_a_command_that_cannot_be_started_is_reported(run: Run) -> None:
    """The interpreter vanishes between the look at it and the start of the second incarnation."""
    python = run.path / "python"
    python.symlink_to(sys.executable)
    source = f"import os\nos.unlink({str(python)!r})\nos.kill(os.getpid(), 9)\n"
    assert run.script(source, script=f'python = "{python}"\n').wait(PATIENCE_S) == 2
    assert "cannot be started" in run.result()["error"]
