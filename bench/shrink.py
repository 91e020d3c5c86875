"""Measure how soon training continues on one node after the other of two dies, also if that one led.

    python -m bench.shrink

Two launchers on this machine with one real rank each of the language recipe, as an elastic job ("1:2"). One launcher
gets SIGKILL after a checkpoint was committed; its rank dies with it. Detection: from the signal to the event that says
so. Shrink: from the signal to the first new step on one rank. Bar: shrink ≤ 3× a cold
start of the two in the same run, at worst, in both cases.
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
from bench.recovery import RUN, first_step, is_committed
from tests.training.launching import Run
from tests.waiting import until

TIMES = 3
SHRINK = 3.0
CASES = {"another": 1, "leading": 0}


def main() -> int:
    print(stage.machine())
    _once(1)  # tokenises, and warms the page cache; not counted
    found: dict[str, list[tuple[float, float, float]]] = {case: [] for case in CASES}
    for _ in range(TIMES):
        for case, node in CASES.items():
            found[case].append(_once(node))
    print(f"a node of two killed, {TIMES} times, s")
    bars = {}
    for case, times in found.items():
        cold, detection, shrink = ([row[i] for row in times] for i in range(3))
        for label, seconds in (("cold start", cold), ("detection", detection), ("shrink", shrink)):
            print(f"  {case:8} {label:11}" + "".join(f"{row:8.3f}" for row in seconds))
        worst = max(row[2] / row[0] for row in times)
        bars[case] = stage.bar(
            f"shrink, the {case} node killed, in cold starts", worst, SHRINK, at_least=False, unit="×"
        )
    medians = {f"{case}_s": statistics.median(row[2] for row in times) for case, times in found.items()}
    return stage.result("shrink", bars=bars, **medians)


def _once(lost: int) -> tuple[float, float, float]:
    """Return the seconds of a cold start, from the kill to its notice, and from the kill to the first new step."""
    folder = Path(tempfile.mkdtemp(prefix="vigil-shrink-"))
    run = Run(folder / "run")
    try:
        run.describe(RUN.replace("ranks_per_node = 2", "nodes = 1\nmax_nodes = 2\nranks_per_node = 1"))
        began = time.time()
        launchers = [run.launch(node=node, nodes=2) for node in (0, 1)]
        cold = first_step(run, 0) - began
        until(lambda: is_committed(run))
        killed = time.time()
        launchers[lost].send_signal(signal.SIGKILL)
        noticed = float(until(lambda: run.events("nodes.lost"))[0]["time"])
        return cold, noticed - killed, first_step(run, 1) - killed
    finally:
        run.end()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
