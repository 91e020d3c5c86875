"""Measure how soon a rank's death is noticed and training continues, compared to a cold start in the same run.

    python -m bench.recovery

Two real ranks of the language recipe; one gets SIGKILL after a checkpoint was committed. Cold start: from starting the
launcher to the first step. Detection: from the signal to the launcher's event. Recovery: from that event to the first
step after the checkpoint. Bars: detection ≤ 1 s, recovery ≤ 1.5× the cold start (medians).
"""

from __future__ import annotations

import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench import stage
from tests.training.launching import Run
from tests.waiting import until
from training.attempt.heartbeat import heartbeat_path, read_beat

TIMES = 5
DETECTION_S = 1.0
RECOVERY = 1.5
RUN = """
kind = "distributed"
[launch]
ranks_per_node = 2
[run]
recipe = "language"
steps = 1000000
global_batch = 8
validate_every = 0
checkpoint_every = 50
flush_steps = 1
[run.language]
layers = 2
heads = 2
head_width = 16
context = 64
"""


def main() -> int:
    print(stage.machine())
    _once()  # tokenises, and warms the page cache; not counted
    found = [_once() for _ in range(TIMES)]
    cold, detection, recovery = ([times[i] for times in found] for i in range(3))
    ratios = [again / first for first, _, again in found]
    print(f"a rank of two killed, {TIMES} times, s")
    for label, seconds in (("cold start", cold), ("detection", detection), ("recovery", recovery), ("ratio", ratios)):
        print(f"  {label:12}" + "".join(f"{times:8.3f}" for times in seconds))
    found_s, ratio = statistics.median(detection), statistics.median(ratios)
    bars = {
        "detection": stage.bar("detection", found_s, DETECTION_S, at_least=False, unit=" s", has_timers=True),
        "recovery": stage.bar("recovery, in cold starts", ratio, RECOVERY, at_least=False, unit="×"),
    }
    return stage.result("recovery", bars=bars, cold_s=statistics.median(cold), detection_s=found_s, ratio=ratio)


def _once() -> tuple[float, float, float]:
    """Return the seconds of a cold start, of noticing the death, and from there to the first new step."""
    folder = Path(tempfile.mkdtemp(prefix="vigil-recovery-"))
    run = Run(folder / "run")
    try:
        run.describe(RUN)
        began = time.time()
        run.launch()
        cold = first_step(run, 0) - began
        until(lambda: is_committed(run))
        victim = next(process for process in run.processes() if process.environ().get("RANK") == "1")
        killed = time.time()
        victim.send_signal(signal.SIGKILL)
        noticed = float(until(lambda: run.events("incarnation.ended"))[0]["time"])
        again = first_step(run, 1)
        return cold, noticed - killed, again - noticed
    finally:
        run.end()
        shutil.rmtree(folder, ignore_errors=True)


def is_committed(run: Run) -> bool:
    return any(path.name[0] != "." for path in (run.path / "job" / "checkpoints").glob("step-*"))


def first_step(run: Run, incarnation: int) -> float:
    """Return the time at which rank 0 first reported a step, in Unix seconds."""
    path = heartbeat_path(run.attempt(), rank=0, incarnation=incarnation)
    until(lambda: (beat := read_beat(path)) and beat.begun >= 2)
    return time.time()


if __name__ == "__main__":
    sys.exit(main())
