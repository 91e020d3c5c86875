"""Run several short runs on the same ranks, one after the other: starting a rank takes longer than such a run."""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.training.ranks import Run, end_saves_between_steps, fork

SECONDS = 900.0  # of all together: on two cores each of 32 ranks gets a sixteenth of one
TOGETHER = 8
"""Runs on the same ranks: the threads of a mesh's groups stay until a rank ends, and slow down the runs that follow."""


@dataclass(frozen=True)
class _Turn:
    """The attempt as described to its ranks."""

    run_dir: Path
    attempt_dir: Path
    generation: int
    resume: str


def finish(runs: Sequence[Run], world: int, folder: Path, *, resume: str = "", spy: str = "") -> list[Path]:
    """Run an attempt of each run on the same ranks, all of which must succeed; return their folders."""
    turns = [_Turn(run.folder, *run.attempt(resume), resume) for run in runs]
    for first in range(0, len(turns), TOGETHER):
        _finish(turns[first : first + TOGETHER], world, folder / str(first), spy)
    return [turn.attempt_dir for turn in turns]


def _finish(turns: Sequence[_Turn], world: int, folder: Path, spy: str) -> None:
    folder.mkdir(parents=True)
    processes = [fork(_rank, turns, world, rank, folder, spy) for rank in range(world)]
    deadline = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for turn in turns:
        failed = [path for rank in range(world) if (path := turn.attempt_dir / f"failed.{rank}").exists()]
        assert not failed, f"{turn.run_dir}\n{failed[0].read_text()}"
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    logs = [path.read_text() for path in sorted(folder.glob("*.log"))]
    assert codes == [0] * world, f"{codes}\n{logs}"
    warned = {line for log in logs for line in log.splitlines() if "Warning" in line}
    assert warned == set(), "in a job's log a person would look there first"


def _rank(turns: Sequence[_Turn], world: int, rank: int, folder: Path, spy: str) -> None:
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ["VIGIL_STORE_FILE"] = str(folder / "store.json")
    if spy:
        module, _, name = spy.partition(":")
        getattr(importlib.import_module(module), name)()
    from training.runtime import distributed

    end_saves_between_steps()
    joined = distributed.join(on_cpu=True)
    for turn in turns:
        try:
            _take(turn, joined)
        except BaseException:
            (turn.attempt_dir / f"failed.{rank}").write_text(traceback.format_exc())
            os._exit(1)  # its peers notice, or the parent's patience ends
    distributed.leave()


def _take(turn: _Turn, world: object) -> None:
    from training import run_file
    from training.attempt.heartbeat import NullHeartbeat
    from training.attempt.stopping import StopRequest
    from training.attempt.workspace import Workspace
    from training.loop import LoopServices
    from training.reporting.reporter import Reporter
    from training.step.determinism import set_determinism
    from training.trainer import Trainer

    os.environ["VIGIL_ATTEMPT_DIR"] = str(turn.attempt_dir)
    settings = run_file.load(turn.run_dir / "portal" / "run.toml").config
    place = Workspace(turn.run_dir, turn.attempt_dir, 0, turn.generation, turn.resume, launched=True)
    reporter = Reporter(turn.attempt_dir, rank=int(os.environ["RANK"]), incarnation=0, flush_steps=1)
    set_determinism(settings.determinism)
    trainer = Trainer(settings, place, world, LoopServices(reporter, NullHeartbeat(), StopRequest()))  # type: ignore[arg-type]
    assert trainer.run()
    reporter.close()
