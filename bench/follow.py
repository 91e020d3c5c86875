"""Measure a tick of the follower with thousands of jobs in a real Slurm, a few of which changed.

    python -m bench.follow [--release 24.11] [--jobs 5000]

A private slurmctld (tests/slurm, as root) holds the jobs, the database has an attempt for each. In every round twenty
are let go and start, then one whole tick runs: the poll, everything else that a tick looks after, and the queue where
it is due; the ticks of the last rounds read all jobs anew, as one in ten at most does. Counted are the worker's own CPU
time, the time that passed, and the calls to slurmrestd. Bars, on Slurm 24.11: ≤ 1 s of worker time, ≤ 25 calls. On
22.05, which has no short list of states, the same is shown beside.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

from bench import NOT_MEASURED, stage

JOBS = 5_000
CHANGED = 20
ROUNDS = 8
REREAD = 3  # further rounds, whose ticks read the whole queue anew: else one in ten at most does
BAR_S, BAR_CALLS = 1.0, 25
BARRED = "24.11"
_SBATCH = 'sbatch --parsable --hold --mem=10 --output=/dev/null --comment=vigil:$key "$0"'
_SUBMIT = f"for key in $KEYS; do {_SBATCH} & done; wait"
_PARTS = (("worker time", " s"), ("time", " s"), ("calls", ""))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.follow")
    parser.add_argument("--release", choices=["22.05", "24.11"])
    parser.add_argument("--jobs", type=int, default=JOBS)
    options = parser.parse_args()
    if not all(map(stage.has_slurm, [options.release] if options.release else _releases())):
        return NOT_MEASURED
    if options.release is None:
        found = [stage.in_child("bench.follow", "--release", name, "--jobs", str(options.jobs)) for name in _releases()]
        return stage.result(
            "follow", bars={k: v for result in found for k, v in result["bars"].items()}, releases=found
        )
    print(stage.machine())
    with stage.site() as place, ExitStack() as stack:
        stage.django(place)
        from tests.slurm.cluster import cluster

        slurm = stack.enter_context(cluster(options.release, min_job_age_s=600))
        return _measure(slurm, options.release, options.jobs)


def _releases() -> list[str]:
    from tests.slurm.release import RELEASES

    return [release.name for release in RELEASES]


def _measure(slurm: Any, release: str, count: int) -> int:
    from jobs.following import follow
    from jobs.models import Attempt
    from nodes.cluster import sync
    from nodes.models import Reading
    from nodes.schedulers.slurm import scheduler as slurm_scheduler
    from nodes.schedulers.slurm.http import SlurmHttp
    from nodes.schedulers.slurm.rest import SlurmRest
    from nodes.schedulers.slurm.tokens import KeyFileTokens
    from tests.slurm.people import PORTAL

    began = time.monotonic()
    waiting = _submitted(slurm, _attempts(count))
    print(f"Slurm {release}: {len(waiting):,} jobs held after {time.monotonic() - began:.0f} s")
    tokens = KeyFileTokens(slurm.layout.jwt_key)
    http = SlurmHttp(slurm.url, tokens=tokens, user=PORTAL)
    scheduler = slurm_scheduler.Slurm(SlurmRest(http), tokens=tokens, user=PORTAL)
    gc.freeze()  # as console.worker does: what is loaded stays
    first = _tick(http, lambda: follow.tick(scheduler))
    print(
        f"  the first tick, which reads everything: {first[0]:.2f} s of worker time, {first[1]:.2f} s, {first[2]} calls"
    )
    still, changed = [], []
    for number in range(ROUNDS):
        _release_jobs(slurm, waiting[number * CHANGED : (number + 1) * CHANGED])
        changed.append(_tick(http, lambda: follow.tick(scheduler)))
        running = Attempt.objects.filter(state="running").count()
        if running != (number + 1) * CHANGED and release == BARRED:
            raise SystemExit(f"{running} are running after round {number + 1}")
        still.append(_tick(http, lambda: follow.tick(scheduler)))
    # From now on every tick reads the whole queue.
    slurm_scheduler.FRESH_S, slurm_scheduler.LIST_INTERVAL_FACTOR = 0.2, 0
    reread = []
    for number in range(ROUNDS, ROUNDS + REREAD):
        _release_jobs(slurm, waiting[number * CHANGED : (number + 1) * CHANGED])
        sync.hurry(Reading.Part.QUEUE)
        reread.append(_tick(http, lambda: follow.tick(scheduler)))
    for label, ticks in (("20 changed", changed), ("nothing changed", still), ("and all reread", reread)):
        for (part, unit), values in zip(_PARTS, zip(*ticks, strict=True), strict=True):
            median, most = statistics.median(values), max(values)
            print(f"  {label:16} {part:12} median {median:6.2f}{unit}, most {most:6.2f}{unit}")
    worker_s, wall_s, calls = map(max, zip(*changed, *reread, strict=True))
    bars = {}
    if release == BARRED:
        bars["worker_time"] = stage.bar("worker time of a tick", worker_s, BAR_S, at_least=False, unit=" s")
        bars["calls"] = stage.bar("calls of a tick", calls, BAR_CALLS, at_least=False)
    figures = {
        "worker_s": worker_s,
        "wall_s": max(tick[1] for tick in changed + reread),
        "calls": calls,
        "first_s": first[1],
    }
    stage.result("follow", bars=bars, release=release, jobs=count, **figures)
    return 0 if all(bars.values()) else 1


def _tick(http: Any, tick: Any) -> tuple[float, float, int]:
    """Return the seconds of our CPU, the seconds that passed, and the calls to slurmrestd."""
    calls, cpu, began = http.calls, time.process_time(), time.perf_counter()
    tick()
    return time.process_time() - cpu, time.perf_counter() - began, http.calls - calls


def _attempts(count: int) -> list[str]:
    """Create so many attempts that Slurm is to have, of as many jobs; return their keys."""
    from jobs.models import Attempt, Job
    from jobs.spec import JobSpec
    from portal.models import Project, User
    from tests.slurm.people import PORTAL

    owner = User.objects.create(username="sam", is_superuser=True, slurm_user=PORTAL)
    project = Project.objects.create(slug="vision", slurm_account="vision")
    spec = JobSpec.parse({"name": "held", "project": "vision"}).model_dump(mode="json")
    jobs = [Job(project=project, owner=owner, kind="distributed", spec=spec, name=f"held-{n}") for n in range(count)]
    Job.objects.bulk_create(jobs, batch_size=500)
    # As after some ticks: what Slurm says of a held job is known.
    given = {
        "number": 1,
        "state": "pending",
        "reason": "JobHeldUser",
        "token_digest": "x",
        "directory": "attempt-1",
        "scheduler_user": PORTAL,
    }
    Attempt.objects.bulk_create([Attempt(job=job, scheduler_id="?", **given) for job in jobs], batch_size=500)
    return list(Attempt.objects.order_by("id").values_list("key", flat=True))


def _submitted(slurm: Any, keys: list[str]) -> list[str]:
    """Submit a held Slurm job for every key, and write their ids down."""
    from jobs.models import Attempt
    from tests.slurm.people import PORTAL

    script = slurm.layout.scratch / "sleep.sh"
    script.write_text("#!/bin/sh\nexec sleep 3600\n")
    script.chmod(0o755)
    for start in range(0, len(keys), 50):
        some = " ".join(keys[start : start + 50])
        slurm.run("bash", "-c", _SUBMIT, script, user=PORTAL, environment={"KEYS": some})
    rows = slurm.run("squeue", "--noheader", "--format=%i %k").split("\n")
    ids = {key.removeprefix("vigil:"): number for number, _, key in (row.partition(" ") for row in rows) if key}
    if set(ids) != set(keys):
        raise SystemExit(f"Slurm has {len(ids)} of {len(keys)} jobs")
    found = list(Attempt.objects.all())
    for attempt in found:
        attempt.scheduler_id = ids[attempt.key]
    Attempt.objects.bulk_update(found, ["scheduler_id"], batch_size=300)
    return [ids[key] for key in keys]


def _release_jobs(slurm: Any, ids: list[str]) -> None:
    """Release these and wait until Slurm itself says that they run."""
    slurm.run("scontrol", "release", ",".join(ids))

    def run() -> bool:
        states = slurm.run("squeue", "--noheader", f"--jobs={','.join(ids)}", "--format=%T").split()
        return bool(states == ["RUNNING"] * len(ids))

    slurm.wait_for(run, "the jobs to start")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.TimeoutExpired as error:
        sys.exit(str(error))
