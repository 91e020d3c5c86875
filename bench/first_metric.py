"""Time the way from `make run` to the first metric of examples/language.toml, against the floor of importing torch.

    python -m bench.first_metric

Bar: ≤ 2.5× the floor, which is importing torch once per process that trains: here two processes at once, as the
example's two ranks do. Everything is installed already and the example's data is tokenised (the cache of an earlier
run); the home is one that has been started before, as on every start but the first.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from bench import stage
from tests.stack import Stack
from tests.waiting import until

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "language.toml"
RANKS = 2
TIMES = 5
BAR = 2.5


def main() -> int:
    stack = Stack(OMP_NUM_THREADS="1")
    try:
        stack.start(timeout_s=120)
        with stack.client() as client:
            _to_first_metric(client)  # tokenises; not counted
        stack.stop()
        runs, floors = [], []
        for _ in range(TIMES):
            floors.append(_floor())
            began = time.perf_counter()
            stack.start(timeout_s=120)
            ready = time.perf_counter() - began
            with stack.client() as client:
                runs.append((ready, ready + _to_first_metric(client)))
            stack.stop()
    finally:
        stack.close()
    return _print_result(runs, floors)


def _floor() -> float:
    """Return the seconds until RANKS processes, started together, have imported torch."""
    began = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(RANKS)]
    for process in processes:
        process.wait()
    return time.perf_counter() - began


def _to_first_metric(client: httpx.Client) -> float:
    """Return the seconds from the job's submission to the first loss in the portal's answer; then cancel the job."""
    began = time.perf_counter()
    answer = client.post("/api/v1/jobs", json={"spec_toml": EXAMPLE.read_text()})
    answer.raise_for_status()
    job = answer.json()["id"]
    until(lambda: client.get(f"/api/v1/jobs/{job}").json()["latest"].get("loss"), "a loss", at_most_s=0.02)
    seconds = time.perf_counter() - began
    client.post(f"/api/v1/jobs/{job}/cancel")
    until(lambda: client.get(f"/api/v1/jobs/{job}").json()["ended_at"], "the job's end")
    return seconds


def _print_result(runs: list[tuple[float, float]], floors: list[float]) -> int:
    ratios = [run[1] / floor for run, floor in zip(runs, floors, strict=True)]
    print(f"from `vigil up` to the first loss of {EXAMPLE.name}, {TIMES} times, each with its floor")
    print("  floor, torch in 2 processes, s: " + " ".join(f"{floor:.2f}" for floor in floors))
    print("  portal ready, s:                " + " ".join(f"{run[0]:.2f}" for run in runs))
    print("  first loss at the API, s:       " + " ".join(f"{run[1]:.2f}" for run in runs))
    print("  ratios:                         " + " ".join(f"{ratio:.2f}" for ratio in ratios))
    ratio = statistics.median(ratios)
    bars = {"floor": stage.bar("median, times the floor", ratio, BAR, at_least=False, unit="×")}
    return stage.result("first_metric", bars=bars, ratio=ratio, first_loss_s=statistics.median(run[1] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
