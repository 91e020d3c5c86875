"""Measure what an idle portal costs: CPU time and memory of every process of `vigil up`.

    python -m bench.idle [--seconds 120]

Bars: the follower ≤ 0.5 % of a core, all of `vigil up` ≤ 1 %, and ≤ 500 MB, each page of memory counted once (PSS).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench import stage

SECONDS = 120
SETTLE_S = 75  # what a start leaves to be done: rows of the cluster, and each task once, which loads its code
BAR_FOLLOWER, BAR_ALL, BAR_MB = 0.5, 1.0, 500.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.idle")
    parser.add_argument("--seconds", type=int, default=SECONDS)
    seconds = parser.parse_args().seconds
    print(stage.machine())
    with tempfile.TemporaryDirectory(prefix="vigil-bench-") as home:
        log = Path(home) / "up.log"
        port = stage.free_port()
        environment = {"VIGIL_HOME": home, "VIGIL_PORT": str(port)}
        with stage.process([sys.executable, "-m", "console.up"], log, environment=environment) as up:
            _wait_ready(log)
            time.sleep(SETTLE_S)
            before, began = _spent(up.pid), time.monotonic()
            time.sleep(seconds)
            after, took = _spent(up.pid), time.monotonic() - began
            memory = {pid: psutil.Process(pid).memory_full_info().pss / 1e6 for pid in after}
    shares = {pid: 100 * (spent - before.get(pid, (name, 0.0))[1]) / took for pid, (name, spent) in after.items()}
    for pid, (name, _) in after.items():
        print(f"  {name:10} {shares[pid]:5.2f} % of a core, {memory[pid]:6.1f} MB")
    if missing := {"web", "follow", "beat"} - {name for name, _ in after.values()}:
        raise SystemExit(f"not running: {', '.join(sorted(missing))}")
    follower = sum(shares[pid] for pid, (name, _) in after.items() if name == "follow")
    bars = {
        "follower": stage.bar("the follower", follower, BAR_FOLLOWER, at_least=False, unit=" % of a core"),
        "all": stage.bar("all of `vigil up`", sum(shares.values()), BAR_ALL, at_least=False, unit=" % of a core"),
        "memory": stage.bar("memory", sum(memory.values()), BAR_MB, at_least=False, unit=" MB"),
    }
    figures = {"follower_percent": follower, "all_percent": sum(shares.values()), "mb": sum(memory.values())}
    return stage.result("idle", bars=bars, seconds=took, **figures)


def _wait_ready(log: Path, timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not (log.exists() and "is ready" in log.read_text()):
        if time.monotonic() > deadline:
            raise SystemExit(f"the portal does not come up:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


def _spent(pid: int) -> dict[int, tuple[str, float]]:
    """Return the name and CPU seconds of each process, by pid."""
    found = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        times = process.cpu_times()
        found[process.pid] = (_name(process.cmdline()), times.user + times.system)
    return found


def _name(command: list[str]) -> str:
    for word, name in (("console.up", "up"), ("console.web", "web"), ("beat", "beat"), ("redis", "redis")):
        if any(word in part for part in command):
            return name
    return command[command.index("console.worker") + 1] if "console.worker" in command else command[0]


if __name__ == "__main__":
    sys.exit(main())
