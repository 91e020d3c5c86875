"""Test the stop protocol from the ranks' side, the fence, and saves that fail (protocols.md §2, §4)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.ranks import SECONDS, TINY, Incarnation, Run, Sabotage
from tests.waiting import until
from training.attempt.files import write_json
from training.attempt.heartbeat import heartbeat_path, read_beat
from training.attempt.lineage import newest_on_lineage, raise_generation
from training.attempt.stopping import POLL_SECONDS

pytestmark = pytest.mark.slow

LONG = {**TINY, "steps": 100_000, "checkpoint_every": 0}


def _request(incarnation: Incarnation, reason: str = "cancel") -> None:
    write_json(incarnation.attempt_dir / "stop-requested", {"reason": reason, "time": time.time()})


def _step_of(incarnation: Incarnation, rank: int = 0) -> int:
    beat = read_beat(heartbeat_path(incarnation.attempt_dir, rank=rank, incarnation=0))
    return beat.step if beat else 0


def test_all_ranks_stop_at_the_same_step(tmp_path: Path) -> None:
    """And wait for the commit alone: to read back what was written may take longer than they are given."""
    run = Run(tmp_path / "run", dict(LONG))
    never = Sabotage("training.manifest:_digest", rank=1, until=str(tmp_path / "never"))
    incarnation = run.start(2, sabotage=never)
    until(lambda: _step_of(incarnation) > 5)
    _request(incarnation)
    assert incarnation.wait() == [0, 0], incarnation.output()
    stopped = json.loads((incarnation.attempt_dir / "stopped.json").read_text())
    (saved,) = run.checkpoints
    assert (saved.step, saved.name, saved.generation) == (stopped["step"], stopped["name"], stopped["generation"])
    assert stopped["reason"] == "cancel"
    assert [max(run.series(rank=rank)) for rank in (0, 1)] == [saved.step, saved.step]
    assert saved.consumed_samples == saved.step * TINY["global_batch"]
    assert run.events("stop.saved")[0]["step"] == saved.step
    assert not run.events("run.completed")


def test_requested_before_the_first_step(tmp_path: Path) -> None:
    """During start-up a stop waits for the first boundary, which is before the first step."""
    run = Run(tmp_path / "run", dict(LONG))
    incarnation = run.start(
        2, sabotage=Sabotage("training.loader.order:Loader.ids", until=str(tmp_path / "go"), act="")
    )
    _request(incarnation, "signal")
    (tmp_path / "go").touch()
    assert incarnation.wait() == [0, 0], incarnation.output()
    assert [found.name for found in run.checkpoints] == ["step-0"]


def test_requested_during_a_validation(tmp_path: Path) -> None:
    """The validation is cut short and its half result is not reported; whoever goes on does it first."""
    run = Run(tmp_path / "run", {**LONG, "validate_every": 5, "keep_best": 1, "keep_checkpoints": 1000})
    waiting = Sabotage("training.engine.validating:fixed_batch", until=str(tmp_path / "go"), act="", rank=1)
    incarnation = run.start(2, sabotage=waiting)
    until(lambda: _step_phase(incarnation, rank=1, phase="validate"))
    _request(incarnation)
    polled_at = time.monotonic() + POLL_SECONDS  # the validation may otherwise be over before a rank polls
    until(lambda: time.monotonic() > polled_at)
    (tmp_path / "go").touch()
    assert incarnation.wait() == [0, 0], incarnation.output()
    assert [found.step for found in run.checkpoints] == [5]
    assert run.series("validation_loss") == {}
    again = run.start(2, resume="step-5")
    until(lambda: _step_of(again) > 5)
    _request(again)
    assert again.wait() == [0, 0], again.output()
    (report,) = [found for found in run.checkpoints if found.name == "step-5"]
    assert report.generation == 2, "the best so far: saved again, so that it is kept as such"
    assert report.state["validation_loss"] == run.series("validation_loss")[5]


def test_ranks_ignore_the_signals_that_reach_the_whole_group(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", dict(LONG))
    incarnation = run.start(2)
    until(lambda: _step_of(incarnation) > 2)
    for _ in range(2):
        incarnation.kill(signal.SIGTERM)
        incarnation.kill(signal.SIGUSR1)
    before = _step_of(incarnation)
    until(lambda: _step_of(incarnation) > before + 3)
    _request(incarnation)
    assert incarnation.wait() == [0, 0], incarnation.output()


def test_stacks_on_usr2(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", dict(LONG))
    incarnation = run.start(
        1, sabotage=Sabotage("training.step.arithmetic:learning_rate", until=str(tmp_path / "never"))
    )
    stacks = incarnation.attempt_dir / "stacks" / "0.0.txt"
    until(lambda: _step_phase(incarnation))

    def has_stacks() -> bool:
        incarnation.kill(signal.SIGUSR2)
        return "_run_step" in stacks.read_text()

    until(has_stacks)
    incarnation.kill()


def _step_phase(incarnation: Incarnation, rank: int = 0, phase: str = "step") -> bool:
    beat = read_beat(heartbeat_path(incarnation.attempt_dir, rank=rank, incarnation=0))
    return beat is not None and beat.phase == phase


def test_a_newer_generation_ends_this_run(tmp_path: Path) -> None:
    """kill -9 of the node's daemon leaves ranks alive: they must not commit once another launch has begun."""
    run = Run(tmp_path / "run")
    incarnation = run.start(
        1, sabotage=Sabotage("training.checkpoint.committing:_fsync_folder", until=str(tmp_path / "go"), act="")
    )
    until(lambda: list((run.job_dir / "checkpoints").glob(".step-4.*/COMMITTED")))
    raise_generation(run.job_dir, previous=None, resume="")
    (tmp_path / "go").touch()
    assert incarnation.wait() == [1]
    assert "must not write any more" in incarnation.output()
    assert run.checkpoints == []
    assert run.events("run.failed")[0]["exception"] == "Fenced"
    run.finish(1)
    assert not list((run.job_dir / "checkpoints").glob(".*")), "what the older generation left is cleared away"


def test_a_due_save_is_skipped_while_another_is_in_flight(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {**TINY, "steps": 40})
    go = tmp_path / "go"
    incarnation = run.start(
        2, sabotage=Sabotage("training.checkpoint.storage:write", until=str(go), act=""), patient=False
    )
    until(lambda: _step_of(incarnation) >= 30)
    assert run.checkpoints == []
    go.touch()
    assert incarnation.wait() == [0, 0], incarnation.output()
    skipped = [event["step"] for event in run.events("checkpoint.skipped")]
    assert skipped[:6] == [8, 12, 16, 20, 24, 28]
    assert run.checkpoints[-1].step == 40
    assert run.checkpoints[0].step == 4


def test_a_full_disk_costs_the_checkpoint_not_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    incarnation = run.start(2, sabotage=Sabotage("training.checkpoint.storage:_Stream.write", act="fail", rank=1))
    assert incarnation.wait() == [0, 0], incarnation.output()
    (skipped,) = run.events("checkpoint.skipped")
    assert skipped["step"] == 4
    assert skipped["reason"] == "rank 1: [Errno 28] No space left on device"
    assert not list((run.job_dir / "checkpoints").glob(".step-*")), "what was half written goes"
    assert [found.step for found in run.checkpoints] == [8, 12]
    assert run.checkpoints[0].parent is None


def test_pruning_spares_the_start_the_pinned_and_two_verified(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {**TINY, "steps": 6, "checkpoint_every": 2, "keep_checkpoints": 1})
    run.finish(1)
    assert [found.step for found in run.checkpoints] == [4, 6]
    pins = run.folder / "portal" / "pinned.json"
    pins.write_text(json.dumps({"pinned": [{"name": "step-4", "step": 4, "generation": 1}]}))
    run.write(steps=20)
    run.finish(1, resume="step-6")
    assert [found.step for found in run.checkpoints] == [4, 6, 18, 20]
    run.write(steps=24)
    run.finish(1, resume="step-20")
    assert [found.step for found in run.checkpoints] == [4, 20, 22, 24], "the start of an earlier attempt may go"
    assert [event["step"] for event in run.events("checkpoint.pruned")] == [6, 18]
    pins.write_text('{"pinned": [{"step": 4')
    run.write(steps=26)
    run.finish(1, resume="step-24")
    assert [found.step for found in run.checkpoints] == [24, 26], "what makes no sense pins nothing"


def test_going_back_keeps_the_other_line(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.finish(1)
    run.finish(1, resume="step-4")
    names = {found.name: found for found in run.checkpoints}
    assert set(names) == {"step-4", "step-8", "step-8.g1", "step-12", "step-12.g1"}
    assert names["step-8"].parent == (4, 1)
    assert names["step-12"].parent == (8, 2)
    assert names["step-12.g1"].parent == (8, 1)
    assert newest_on_lineage(run.job_dir) == "step-12"
    run.write(steps=16)
    run.finish(1, resume="step-12.g1")
    assert {found.name for found in run.checkpoints if found.step == 16} == {"step-16"}
    assert run.checkpoints[-1].parent == (12, 1)


def test_damage_is_found_on_resume_and_passed_by_afterwards(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.finish(2)
    shard = run.job_dir / "checkpoints" / "step-12" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert newest_on_lineage(run.job_dir) == "step-12"
    run.write(steps=16)
    incarnation = run.start(2, resume="step-12")
    assert incarnation.wait() == [1, 1]
    assert "__1_0.distcp is not what was written" in incarnation.output()
    assert newest_on_lineage(run.job_dir) == "step-8"
    run.finish(2, resume="step-8")


def _standalone(tmp_path: Path, *arguments: str, steps: int = 100_000) -> subprocess.Popen[str]:
    spec = tmp_path / "spec.toml"
    settings = {**TINY, "steps": steps}
    options = settings.pop("language")
    lines = ['name = "by-hand"', "[run]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())]
    lines += ["[run.language]", *(f"{name} = {json.dumps(value)}" for name, value in options.items())]
    spec.write_text("\n".join(lines))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "training", str(spec), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_by_hand_ctrl_c_saves_and_the_next_start_goes_on(tmp_path: Path) -> None:
    process = _standalone(tmp_path)
    until(lambda: (tmp_path / "runs/by-hand/job/checkpoints/step-4/COMMITTED").exists())
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 75, output
    stopped = int(output.partition("stopped at step ")[2].partition(",")[0])
    again = _standalone(tmp_path, steps=stopped + 3)
    output, _ = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, output
    assert f"from step-{stopped}" in output
    assert f"completed at step {stopped + 3}" in output
    newest = tmp_path / "runs/by-hand/job/checkpoints" / f"step-{stopped + 3}"
    verify = subprocess.run([sys.executable, "-m", "training", "verify", newest], capture_output=True, text=True)
    assert verify.returncode == 0, verify.stderr
    assert "verified" in verify.stdout


def test_by_hand_another_model_in_the_same_folder_is_refused_with_how_to_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        process = _standalone(tmp_path, *arguments, steps=6)
        output, _ = process.communicate(timeout=SECONDS)
        return process.returncode, output

    assert run()[0] == 0
    monkeypatch.setitem(TINY, "language", {**TINY["language"], "layers": 3})
    code, output = run()
    assert code == 1, output
    assert "run.language.layers: is 3, but step-6 was trained with 2. Choose another --run-dir, or start over" in output
    code, output = run("--resume", "none")
    assert code == 0, output


def test_what_breaks_while_the_interpreter_ends_fails_no_completed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = _standalone(tmp_path, steps=3)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    assert "completed at step 3" in output, "its output is there to the last line"
