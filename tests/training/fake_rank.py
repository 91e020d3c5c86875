"""A fake rank without torch: heartbeat, reports, steps in lockstep, commits, and accidents.

    python fake_rank.py '{"steps": 50, "accidents": [{"rank": 1, "step": 9, "do": "kill"}]}'

An accident happens in incarnation 0 unless it names another. Ranks wait for each other at every step, as in a
collective; if a peer has gone, a rank raises the exception that gloo would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vigil_report
from training.attempt import hang
from training.attempt.heartbeat import Heartbeat
from training.reporting.reporter import Reporter

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
INCARNATION = int(os.environ["VIGIL_INCARNATION"])
ATTEMPT = Path(os.environ["VIGIL_ATTEMPT_DIR"])
SYNC = ATTEMPT / "sync"


def main(options: dict[str, Any]) -> int:
    hang.install(ATTEMPT, rank=RANK, incarnation=INCARNATION)
    heartbeat = Heartbeat.open(ATTEMPT, rank=RANK, incarnation=INCARNATION)
    heartbeat.beat("start")
    happen(options, "start", heartbeat)
    heartbeat.beat("init")
    happen(options, "init", heartbeat)
    meet(-1)
    reporter = Reporter(ATTEMPT, rank=RANK, incarnation=INCARNATION, flush_seconds=0.05)
    step = int(os.environ["VIGIL_RESUME"].removeprefix("step-").split(".")[0] or 0)
    heartbeat.beat("step", step)
    while step < options["steps"]:
        heartbeat.beat("step", step)
        happen(options, step, heartbeat)
        time.sleep(options.get("step_seconds", 0.01))
        meet(step)
        step += 1
        reporter.log(step, loss=1 / step)
        stopping = decide(step)
        if stopping or step % options.get("checkpoint_every", 1000) == 0:
            heartbeat.beat("save", step)
            commit(step, reporter)
        if stopping:
            if RANK == 0:
                (ATTEMPT / "stopped.json").write_text(json.dumps({"step": step}))
            break
    heartbeat.beat("end", step)
    happen(options, "end", heartbeat)
    reporter.close()
    return 0


def happen(options: dict[str, Any], at: object, heartbeat: Heartbeat) -> None:
    for accident in options.get("accidents", []):
        now = accident.get("incarnation", 0) in (INCARNATION, "any")
        if now and accident["step"] == at and accident["rank"] == RANK:
            do(accident, heartbeat)


def do(accident: dict[str, Any], heartbeat: Heartbeat) -> None:
    kind = accident["do"]
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "say":
        print(f"Traceback (most recent call last):\n{accident['error']}", file=sys.stderr)
        sys.exit(1)
    elif kind == "raise":
        raise ValueError("the learning rate is a fish")
    elif kind == "exit":
        sys.exit(accident["code"])
    elif kind == "hang":
        time.sleep(3600)
    elif kind == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "phase":
        heartbeat.beat(accident["phase"], accident["step"] if isinstance(accident["step"], int) else 0)
        time.sleep(accident["seconds"])
    elif kind == "leave":  # a process of its own session, which outlives its parent
        subprocess.Popen(["sleep", "3600"], start_new_session=True)


def meet(step: int) -> None:
    """Wait until every rank is at this step, or one has gone."""
    SYNC.mkdir(exist_ok=True)
    own_file = SYNC / f"{INCARNATION}.{RANK}"
    temporary = own_file.with_name(f".{own_file.name}")
    temporary.write_text(f"{step} {os.getpid()}")
    temporary.rename(own_file)
    for rank in range(WORLD):
        wait_for(rank, lambda rank=rank: (place := where_is(rank)) is not None and place[0] >= step)  # type: ignore[misc]


def wait_for(rank: int, has_done: Callable[[], bool]) -> None:
    """Wait until this rank has done something; raise like gloo if it has exited without doing it."""
    while not has_done():
        is_gone = (place := where_is(rank)) is not None and not alive(place[1])
        if is_gone and not has_done():
            raise RuntimeError("[pair.cc:544] Connection closed by peer [127.0.0.1]:4242")
        time.sleep(0.002)


def where_is(rank: int) -> tuple[int, int] | None:
    try:
        step, pid = (SYNC / f"{INCARNATION}.{rank}").read_text().split()
    except (OSError, ValueError):
        return None
    return int(step), int(pid)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def decide(step: int) -> bool:
    """Let rank 0 check for the request to stop, so that all ranks stop at the same step."""
    word = SYNC / f"{INCARNATION}.stop.{step}"
    if RANK == 0:
        temporary = word.with_name(f".{word.name}")
        requests = [(ATTEMPT / name).exists() for name in ("stop-requested", f"regroup-{INCARNATION}")]
        temporary.write_text(str(any(requests)))
        temporary.rename(word)
    wait_for(0, word.exists)
    return word.read_text() == "True"


def commit(step: int, reporter: Reporter) -> None:
    reporter.flush(wait=5)
    if RANK == 0:
        state = ATTEMPT / "state.json"
        state.write_text(json.dumps({"step": step}))
        assert vigil_report.checkpoint(state, step)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
