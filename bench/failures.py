"""Measure how soon four hundred attempts that fail within a minute are decided on and diagnosed.

    python -m bench.failures [--database postgres] [--attempts 400]

Every two seconds the scheduler reports the next ends, and a tick of the follower handles them; a worker diagnoses
meanwhile, as `vigil up` starts it. A third are restarted because of their verdict. Before that, a backlog of a
hundred is diagnosed alone. Bars, on SQLite and on PostgreSQL: every verdict within 3 minutes of the first end, every
decision within 15 s of its own end and by its verdict, and no tick that takes the worker longer than until the next
is due.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from datetime import datetime
from typing import Any

from bench import stage

ATTEMPTS, BACKLOG = 400, 100
SPREAD_S, TICK_S = 60.0, 2.0
BAR_ALL_S, BAR_DECISION_S = 180.0, 15.0
RANKS, STEPS = 2, 300
DATABASES = ("sqlite", "postgres")
TRACEBACK = 'Traceback (most recent call last):\n  File "/home/mira/{file}", line 40, in main\n    {line}\n{error}\n'
# What the first rank writes last, and what is to be found out.
FAILURES = {
    "program.exception": TRACEBACK.format(file="train.py", line='labels = batch["label"]', error="KeyError: 'label'"),
    "memory.gpu_oom": TRACEBACK.format(
        file="model.py",
        line="scores = q @ k.transpose(-2, -1)",
        error="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of "
        "79.11 GiB of which 1.28 GiB is free.",
    ),
    "storage.io": TRACEBACK.format(
        file="data.py", line="block = file.read(size)", error="OSError: [Errno 5] Input/output error: '/data/7.bin'"
    ),
}
PEER = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:9885\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.failures")
    parser.add_argument("--database", choices=DATABASES)
    parser.add_argument("--attempts", type=int, default=ATTEMPTS)
    options = parser.parse_args()
    if options.database is None:
        arguments = ("--attempts", str(options.attempts))
        found = [stage.in_child("bench.failures", "--database", name, *arguments) for name in DATABASES]
        bars = {f"{result['database']}_{name}": met for result in found for name, met in result["bars"].items()}
        return stage.result("failures", bars=bars, databases=found)
    print(stage.machine())
    with stage.site(options.database) as place:
        stage.django(place)
        return _measure(place, options.database, options.attempts)


def _measure(place: stage.Site, database: str, count: int) -> int:
    import portal.celery  # noqa: F401  (binds tasks to our broker, as every process of ours does)
    from tests.jobs.schedulers import ScriptedScheduler

    scheduler = ScriptedScheduler()
    rate = _backlog(scheduler)
    running = _attempts(count, scheduler, first=BACKLOG)
    command = ["nice", "-n", "5", sys.executable, "-m", "console.worker", "diagnose"]
    log = place.home / "diagnose.log"
    environment = {**place.environment, "VIGIL_LOG_LEVEL": "INFO"}  # it says when it is ready
    with stage.process(command, log, environment=environment) as worker:
        while " ready." not in log.read_text():
            if worker.poll() is not None:
                raise SystemExit(f"the worker does not come up:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        ticks = _fail(scheduler, running)
        decided, found_out, all_s, by_verdict, right = _measure_outcomes(running)
    late = max(decided)
    print(f"{database}: {count} attempts failed within {SPREAD_S:.0f} s, {len(scheduler.submissions)} started anew")
    print(f"  verdicts: {rate:.0f} a second on a backlog; slowest {max(found_out):.1f} s after its end, {right} right")
    print(f"  decisions: slowest {late:.1f} s after its end, {by_verdict} by their verdicts")
    for what, each in (("worker time", [cpu for cpu, _ in ticks]), ("time", [wall for _, wall in ticks])):
        print(f"  {what} of {len(ticks)} ticks: median {statistics.median(each):.2f} s, most {max(each):.2f} s")
    longest = max(cpu for cpu, _ in ticks)
    bars = {
        "verdicts": stage.bar(
            "all verdicts after the first end", all_s, BAR_ALL_S, at_least=False, unit=" s", has_timers=True
        ),
        "decisions": stage.bar("slowest decision", late, BAR_DECISION_S, at_least=False, unit=" s", has_timers=True),
        "by_verdict": stage.bar("decisions by verdict", by_verdict, count),
        "right": stage.bar("verdicts that are right", right, count),
        "tick": stage.bar("worker time of a tick", longest, TICK_S, at_least=False, unit=" s"),
    }
    figures = {"verdicts_a_second": rate, "slowest_verdict_s": max(found_out), "slowest_decision_s": late}
    return stage.result("failures", bars=bars, database=database, tick_s=longest, **figures)


def _attempts(count: int, scheduler: Any, *, first: int) -> list[Any]:
    """Create this many running attempts, each of its own job, with the files of their ranks and launchers."""
    from jobs.models import Attempt, Job
    from jobs.spec import JobSpec
    from nodes.schedulers.base import JobStatus
    from portal.models import Project, User

    owner, _ = User.objects.get_or_create(username="sam", is_superuser=True)
    project, _ = Project.objects.get_or_create(slug="vision")
    spec = JobSpec.parse({"name": "fails", "project": "vision", "resources": {"ranks_per_node": RANKS}})
    given = {"project": project, "owner": owner, "kind": "distributed", "spec": spec.model_dump(mode="json")}
    jobs = Job.objects.bulk_create([Job(name=f"fails-{first + n}", spec_toml="", **given) for n in range(count)])
    state = {"number": 1, "state": "running", "token_digest": "x", "directory": "attempt-1", "nodes": ["dgx-01"]}
    rows = [Attempt(job=job, scheduler_id=str(10_000 + first + n), **state) for n, job in enumerate(jobs)]
    made = Attempt.objects.bulk_create(rows)
    for attempt in made:
        attempt.job.latest = attempt
        _write_run_directory(attempt)
        scheduler.jobs[attempt.scheduler_id] = JobStatus(
            scheduler_id=attempt.scheduler_id, state="running", key=attempt.key, nodes=("dgx-01",)
        )
    Job.objects.bulk_update([attempt.job for attempt in made], ["latest", "directory"], batch_size=200)
    return made


def _write_run_directory(attempt: Any) -> None:
    from jobs.disk import rundir
    from tests.jobs.following.launchers import launched

    attempt.job.directory = rundir.make("vision", attempt.job.pk)
    error = FAILURES[_cause(attempt)].splitlines()[-1]
    failure = {"rank": 0, "incarnation": 0, "kind": "exception", "exit_code": 1, "signal": None, "error": error}
    logs = launched(attempt, cause="failed", exit_code=1, first_failure=failure) / "logs"
    steps = "".join(f"step {step} loss {1 + 1 / step:.4f} tokens/s 41,200\n" for step in range(1, STEPS))
    (logs / "0.0.log").write_text(steps + FAILURES[_cause(attempt)])
    (logs / "0.1.log").write_text(steps + PEER)
    (logs / "launcher.0.log").write_text("attempt 1 on dgx-01, node 0 of 1, 2 ranks\n")


def _cause(attempt: Any) -> str:
    return list(FAILURES)[int(attempt.scheduler_id) % len(FAILURES)]


def _backlog(scheduler: Any) -> float:
    """Return verdicts per second while nothing else runs."""
    from jobs.following import ending
    from jobs.following.end_causes.cause import AttemptEnd
    from jobs.models import Attempt
    from jobs.postmortem import incidents

    for attempt in _attempts(BACKLOG, scheduler, first=0):
        ending.end(attempt, AttemptEnd("failed", 1))
    incidents.warm_up()
    began = time.monotonic()
    done = incidents.diagnose_due(began + BAR_ALL_S)
    rate = done / (time.monotonic() - began)
    Attempt.objects.exclude(ended_at=None).delete()
    scheduler.jobs.clear()
    return rate


def _fail(scheduler: Any, running: list[Any]) -> list[tuple[float, float]]:
    """Fail all attempts, evenly spaced, with a tick every two seconds until each has its decision and verdict.

    Returns the seconds of our CPU and the elapsed seconds of each tick.
    """
    from jobs.following import follow
    from jobs.models import Attempt, Incident

    ids = [attempt.pk for attempt in running]
    undecided = Attempt.objects.filter(pk__in=ids, decided_at=None)
    unknown = Incident.objects.filter(attempt__in=ids, version=0)
    ticks: list[tuple[float, float]] = []
    waiting, began = list(running), time.monotonic()
    a_tick = len(running) * TICK_S / SPREAD_S
    while waiting or undecided.exists() or unknown.exists():
        if time.monotonic() - began > SPREAD_S + BAR_ALL_S:
            raise SystemExit(f"{undecided.count()} are not decided on, {unknown.count()} not diagnosed")
        ended = round(a_tick * (len(ticks) + 1)) - (len(running) - len(waiting))
        for attempt in waiting[:ended]:
            scheduler.update_job(attempt.scheduler_id, state="failed", exit_code=1)
        waiting = waiting[ended:]
        cpu, wall = time.process_time(), time.monotonic()
        follow.tick(scheduler)
        ticks.append((time.process_time() - cpu, time.monotonic() - wall))
        time.sleep(max(0.0, TICK_S - ticks[-1][1]))
    return ticks


def _measure_outcomes(running: list[Any]) -> tuple[list[float], list[float], float, int, int]:
    """Return how soon and how well the failures were handled.

    Returns the seconds from each end to its decision and to its verdict, the seconds of all together, the number of
    decisions that a verdict made, and the number of right verdicts.
    """
    from jobs.models import Diagnosis

    rows = Diagnosis.objects.filter(incident__attempt__in=[attempt.pk for attempt in running], version=1)
    found: list[Any] = list(rows.select_related("incident__attempt"))
    decided = [
        _seconds(diagnosis.incident.attempt.ended_at, diagnosis.incident.attempt.decided_at) for diagnosis in found
    ]
    found_out = [_seconds(diagnosis.incident.attempt.ended_at, diagnosis.made_at) for diagnosis in found]
    all_s = _seconds(
        min(diagnosis.incident.attempt.ended_at for diagnosis in found), max(diagnosis.made_at for diagnosis in found)
    )
    by_verdict = sum(diagnosis.incident.attempt.decided_version > 0 for diagnosis in found)
    right = sum(diagnosis.cause == _cause(diagnosis.incident.attempt) for diagnosis in found)
    return decided, found_out, all_s, by_verdict, right


def _seconds(since: datetime, until: datetime) -> float:
    return (until - since).total_seconds()


if __name__ == "__main__":
    sys.exit(main())
