"""A small model of slurmctld, slurmdbd and slurmrestd behind httpx.MockTransport; its true state is always known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.nodes.slurm.simulated_rest import paths

MIN_JOB_AGE_S = 60.0
REQUEUE_WAIT_S = 16.0
OLD, NEW = "v0.0.38", "v0.0.42"


@dataclass
class Run:
    """A row of the accounting database."""

    submitted: float
    restart: int
    started: float = 0.0
    ended: float = 0.0
    state: str = "PENDING"
    is_accounted: bool = False  # slurmdbd has stored what is written here


@dataclass
class Job:
    job_id: int
    key: str
    array: int = 0
    task: int | None = None
    waiting: tuple[int, ...] = ()  # tasks of an array that wait together in this one
    state: str = "PENDING"
    restart: int = 0
    begin: float = 0.0
    ended: float = 0.0
    exit_code: int = 0
    before: str = ""
    reason: str = "None"
    runs: list[Run] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.array}_{self.task}" if self.task is not None else str(self.job_id)

    @property
    def is_over(self) -> bool:
        return self.state in {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


class Model:
    """The modelled cluster. `now` is the common clock; `skew` is how far Slurm's clock is ahead."""

    def __init__(self, version: str = NEW, skew: float = 0.0) -> None:
        self.version, self.skew = version, skew
        self.now = 1_700_000_000.0
        self.next_id = 1
        self.live: dict[int, Job] = {}  # what slurmctld remembers
        self.all: dict[str, Job] = {}  # by the id that a person has
        self.accounts: list[tuple[Job, Run]] = []  # in the order in which slurmctld wrote
        self.changed_at = self.now
        self.is_up = {"slurmctld": True, "slurmdbd": True, "slurmrestd": True}
        self.drops_lists = False  # slurmrestd is too slow for lists of jobs
        self.calls: list[str] = []

    # What happens in the cluster

    def submit(self, tasks: int = 0) -> Job:
        job = Job(self.next_id, f"{self.next_id:016x}")
        self.next_id += 1
        if tasks:
            job.array, job.waiting = job.job_id, tuple(range(tasks))
            for task in job.waiting:
                self.all[f"{job.job_id}_{task}"] = job
        else:
            self.all[job.name] = job
        self.live[job.job_id] = job
        self._account(job)
        self._touch()
        return job

    def start(self, job: Job) -> Job:
        if job.waiting:
            job = self._split(job)
        job.state = "RUNNING"
        job.runs[-1].started, job.runs[-1].state = self._clock(), "RUNNING"
        self._delay_accounting(job)
        return job

    def end(self, job: Job, state: str, exit_code: int = 0) -> None:
        job.state, job.ended, job.exit_code = state, self.now, exit_code
        job.runs[-1].ended, job.runs[-1].state = self._clock(), state
        self._delay_accounting(job)

    def requeue(self, job: Job, why: str) -> None:
        job.runs[-1].ended = self._clock()
        job.runs[-1].state = why or "REQUEUED"
        job.before, job.state, job.restart = why.lower(), "PENDING", job.restart + 1
        job.begin = self.now + REQUEUE_WAIT_S
        self._delay_accounting(job)
        self._account(job)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if not self.is_up["slurmctld"]:
            return
        for job in list(self.live.values()):
            if job.is_over and self.now - job.ended > MIN_JOB_AGE_S:
                del self.live[job.job_id]
                self._touch()
        if self.is_up["slurmdbd"]:
            for _, run in self.accounts:
                run.is_accounted = True

    def _split(self, job: Job) -> Job:
        """Give the first waiting task its own id; the last one keeps the array's."""
        first, *rest = job.waiting
        if rest:
            job.waiting = tuple(rest)
            task = Job(self.next_id, job.key, array=job.array, task=first)
            self.next_id += 1
            self._account(task)
        else:
            task = job
            task.waiting, task.task = (), first
        self.live[task.job_id] = self.all[task.name] = task
        return task

    def _account(self, job: Job) -> None:
        run = Run(self._clock(), job.restart)
        job.runs.append(run)
        self.accounts.append((job, run))

    def _delay_accounting(self, job: Job) -> None:
        for run in job.runs[-2:]:
            run.is_accounted = False
        self._touch()

    def _touch(self) -> None:
        self.changed_at = self.now

    def _clock(self) -> float:
        return float(int(self.now + self.skew))

    # What slurmrestd answers

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.calls.append(path)
        if not self.is_up["slurmrestd"]:
            raise httpx.ConnectError("Connection refused", request=request)
        if path.startswith("/openapi"):
            return paths(self.version)
        _, service, version, *rest = path.split("/")
        if version != self.version:
            return httpx.Response(404, text="Unable find requested URL.")
        if service == "slurmdb":
            return self._accounted(rest)
        if not self.is_up["slurmctld"]:
            payload = {"errors": [{"error_number": -1, "error": "Unspecified error"}], "jobs": []}
            return httpx.Response(500 if version == OLD else 502, json=payload)
        return self._controller_answer(rest, request)

    def _controller_answer(self, rest: list[str], request: httpx.Request) -> httpx.Response:
        if rest == ["diag"]:
            return httpx.Response(200, json={"statistics": {"req_time": self._number(self._clock())}})
        if rest == ["jobs", "state"]:
            return httpx.Response(200, json={"jobs": [row for job in self.live.values() for row in self._states(job)]})
        if rest == ["jobs"]:
            if self.drops_lists:
                raise httpx.ReadTimeout("", request=request)
            since = float(request.url.params.get("update_time", 0))
            if since - 1 >= int(self.changed_at + self.skew):
                return httpx.Response(304)
            return httpx.Response(200, json={"jobs": [self._job(job) for job in self.live.values()], "errors": []})
        requested = int(rest[1])
        found = [job for job in self.live.values() if requested in {job.job_id, job.array}]
        if not found:
            payload = {"jobs": [], "errors": [{"error_number": 2017, "error": "Invalid job id specified"}]}
            return httpx.Response(500 if self.version == OLD else 404, json=payload)
        return httpx.Response(200, json={"jobs": [self._job(job) for job in found]})

    def _accounted(self, rest: list[str]) -> httpx.Response:
        if not self.is_up["slurmdbd"]:
            payload = {"errors": [{"error_number": 7000, "error": "Unable to connect to database"}], "jobs": []}
            return httpx.Response(200 if self.version == OLD else 502, json=payload)
        request = int(rest[1])
        rows = [(job, run) for job, run in self.accounts if request in {job.job_id, job.array} and run.is_accounted]
        payload = {"jobs": [self._row(job, run) for job, run in rows if not job.waiting], "errors": []}
        if not rows and self.version == OLD:
            payload["errors"] = [{"error_number": 9003, "error": "Nothing found with query"}]
        return httpx.Response(200, json=payload)

    def _states(self, job: Job) -> list[dict[str, Any]]:
        ids = [f"{job.job_id}_{task}" for task in job.waiting]
        ids = ids or [f"{job.job_id}_{job.task}" if job.task is not None else str(job.job_id)]
        return [{"job_id": item, "state": [job.state]} for item in ids]

    def _job(self, job: Job) -> dict[str, Any]:
        run = job.runs[-1]
        return {
            "job_id": job.job_id, "name": f"train.{job.key}", "comment": f"vigil:{job.key}", "user_name": "alice",
            "job_state": job.state if self.version == OLD else [job.state], "array_job_id": self._number(job.array),
            "array_task_id": None if job.task is None else self._number(job.task),
            "array_task_string": ",".join(map(str, job.waiting)), "restart_cnt": job.restart,
            "exit_code": job.exit_code << 8 if self.version == OLD else self._exit(job.exit_code),
            "submit_time": self._number(run.submitted), "start_time": self._number(run.started),
            "end_time": self._number(run.ended), "nodes": "dgx01" if run.started else "", "state_reason": job.reason,
            "partition": "batch",
        }  # fmt: skip

    def _row(self, job: Job, run: Run) -> dict[str, Any]:
        state = ["PENDING", "REQUEUED"] if run.state == "REQUEUED" and self.version == NEW else [run.state]
        row: dict[str, Any] = {
            "job_id": job.job_id, "name": f"train.{job.key}", "user": "alice", "nodes": "dgx01", "steps": [],
            "comment": {"job": f"vigil:{job.key}"}, "exit_code": {"status": "SUCCESS", "return_code": 0},
            "array": {"job_id": job.array, "task_id": None if job.task is None else self._number(job.task)},
            "state": {"current": state[0] if self.version == OLD else state, "reason": "None"},
            "time": {"submission": run.submitted, "start": run.started, "end": run.ended},
        }  # fmt: skip
        if self.version == NEW:
            row["restart_cnt"] = run.restart
            row["exit_code"] = self._exit(job.exit_code)
        return row

    def _number(self, value: float) -> object:
        return int(value) if self.version == OLD else {"set": True, "infinite": False, "number": int(value)}

    def _exit(self, code: int) -> dict[str, Any]:
        return {"status": ["ERROR" if code else "SUCCESS"], "return_code": {"set": True, "number": code}}
