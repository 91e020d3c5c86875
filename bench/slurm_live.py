"""Time a change of state from a real Slurm to the socket of a page, by polling and with push.

    python -m bench.slurm_live [--release 24.11]

A whole portal (`vigil up`, as its own Unix user) before a private Slurm; jobs of alice start and end, one at a time.
The change is when slurmctld's own log tells it: the allocation, and the end of the batch script. What is timed ends
when the job's socket has a frame with the new state. Bars: p95 ≤ 3 s by polling, ≤ 0.5 s with docs/slurm/jobcomp.sh
as JobCompLoc and PrologSlurmctld.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import threading
import time
from contextlib import ExitStack, nullcontext
from datetime import datetime
from typing import Any

from bench import NOT_MEASURED, stage

JOBS = 8
LOG = "slurmctld.times.log"
BARS_S = {"polling": 3.0, "push": 0.5}
OVER = frozenset({"completing", "completed", "failed", "cancelled"})
_STARTED = re.compile(r"^\[([^]]+)\] (?:sched|sched/backfill|backfill): .*?(?:Allocate|Started) JobId=(\d+)", re.M)
_ENDED = re.compile(r"^\[([^]]+)\] _job_complete: JobId=(\d+) done", re.M)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.slurm_live")
    parser.add_argument("--release", default="24.11", choices=["22.05", "24.11"])
    options = parser.parse_args()
    if not stage.has_slurm(options.release):
        return NOT_MEASURED
    print(stage.machine())
    from tests.slurm.cluster import cluster
    from tests.slurm.portal import Portal
    from tests.slurm.test_push import SECRET, hooks

    figures, bars = {}, {}
    with ExitStack() as stack:
        slurm = stack.enter_context(cluster(options.release))
        _log_times(slurm)
        portal = Portal(slurm, VIGIL_PUSH_SECRET=SECRET)
        stack.callback(portal.close)
        portal.start()
        portal.make_people()
        alice = portal.as_person("alice")
        for way, limit in BARS_S.items():
            with hooks(slurm, portal) if way == "push" else nullcontext():
                late = [seconds for _ in range(JOBS) for seconds in _time_job(slurm, portal, alice)]
            p50, p95 = statistics.median(late), stage.percentile(late, 0.95)
            print(f"Slurm {options.release}, {way}: {len(late)} changes, median {p50:.2f} s, most {max(late):.2f} s")
            bars[way] = stage.bar(f"{way}, p95", p95, limit, at_least=False, unit=" s", has_timers=True)
            figures[f"{way}_p95_s"] = p95
    return stage.result("slurm_live", bars=bars, release=options.release, **figures)


def _time_job(slurm: Any, portal: Any, alice: Any) -> list[float]:
    """Start and end one job; return the seconds until its socket reported each."""
    from websockets.sync.client import connect

    from tests.slurm.portal import language

    # It waits until its socket is there.
    job_id = alice.submit(language(resources={"begin": _in_a_day()}, steps=5, checkpoint_every=0))
    headers = {"Authorization": alice.client.headers["Authorization"]}
    received_at: dict[str, float] = {}
    with connect(
        f"{portal.url.replace('http', 'ws', 1)}/ws/jobs/{job_id}?format=json", additional_headers=headers, proxy=None
    ) as socket:
        threading.Thread(target=_listen, args=[socket, received_at], daemon=True).start()
        _wait(lambda: alice.job(job_id)["attempt"]["scheduler_id"], "it to be submitted")
        number = alice.job(job_id)["attempt"]["scheduler_id"]
        slurm.run("scontrol", "update", f"jobid={number}", "starttime=now")
        _wait(lambda: "over" in received_at, "its end")
    log = (slurm.layout.folder / "log" / LOG).read_text()
    started, ended = _moment(_STARTED, log, number), _moment(_ENDED, log, number)
    return [received_at["running"] - started, received_at["over"] - ended]


def _listen(socket: Any, received_at: dict[str, float]) -> None:
    from websockets.exceptions import ConnectionClosed

    try:
        for message in socket:
            now, state = time.time(), json.loads(message).get("state")
            if state == "running":
                received_at.setdefault("running", now)
            elif state in OVER:
                received_at.setdefault("over", now)
                return
    except ConnectionClosed:
        return


def _wait(condition: Any, what: str) -> None:
    from tests.waiting import until

    until(condition, what, at_most_s=0.1)


def _log_times(slurm: Any) -> None:
    """Let slurmctld write its log to a file, with times."""
    with slurm.layout.slurm_conf.open("a") as conf:
        conf.write(f"SlurmctldLogFile={slurm.layout.folder}/log/{LOG}\n")
    slurm.run("scontrol", "reconfigure")


def _moment(pattern: re.Pattern[str], log: str, number: str) -> float:
    """Return when slurmctld logged it for this job (its clock is ours, its time local)."""
    at = next(found[1] for found in pattern.finditer(log) if found[2] == number)
    return datetime.fromisoformat(at).timestamp()


def _in_a_day() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 86_400))


if __name__ == "__main__":
    sys.exit(main())
