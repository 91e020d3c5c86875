"""Test random walks of a whole Slurm: `status` always reports the truth, or that it does not know."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import httpx
import pytest

from nodes.schedulers.base import ENDED, UNKNOWN, JobStatus, SchedulerError
from nodes.schedulers.slurm.http import SlurmHttp
from nodes.schedulers.slurm.job_cache import MAX_PENDING_REFRESHED, MAX_SINGLE_REQUESTS
from nodes.schedulers.slurm.rest import SlurmRest
from nodes.schedulers.slurm.scheduler import Slurm
from tests.nodes.slurm.model import NEW, OLD, Job, Model
from tests.nodes.slurm.simulated_rest import FixedToken

STEPS = 100


class Walk:
    def __init__(self, seed: int, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chance = random.Random(seed)
        self.model = Model(version, skew=self.chance.choice([0.0, -300.0, 300.0]))
        monkeypatch.setattr(time, "monotonic", lambda: self.model.now)
        http = SlurmHttp(
            "http://slurm.test", tokens=FixedToken(), user="portal", transport=httpx.MockTransport(self.model)
        )
        self.slurm = Slurm(SlurmRest(http), tokens=FixedToken(), user="portal")
        self.following: dict[str, JobStatus | None] = {}  # as the follower does: until their end
        self.ended: dict[str, JobStatus] = {}
        self.log: list[str] = []

    def step(self) -> None:
        acts: list[tuple[int, Callable[[], None]]] = [
            (6, self.submit), (2, self.submit_array), (8, self.start), (8, self.end), (4, self.requeue),
            (1, self.break_a_daemon), (4, self.mend), (1, self.upgrade), (1, self.wait_long), (1, self.drop_lists),
            (2, self.queue),
        ]  # fmt: skip
        act = self.chance.choices([act for _, act in acts], [weight for weight, _ in acts])[0]
        self.log.append(act.__name__)
        act()
        self.model.pass_time(self.chance.choice([0.5, 2.0, 2.0, 2.0, 4.0]))

    def pick(self, *states: str) -> Job | None:
        up = self.model.is_up["slurmctld"]
        found = [job for job in self.model.live.values() if job.state in states and job.begin <= self.model.now]
        return self.chance.choice(found) if found and up else None

    def submit(self) -> None:
        if all(self.model.is_up.values()) and len(self.following) < 40:
            self.following[self.model.submit().name] = None

    def submit_array(self) -> None:
        if all(self.model.is_up.values()) and len(self.following) < 40:
            job = self.model.submit(tasks=self.chance.randint(1, 4))
            self.following |= {f"{job.job_id}_{task}": None for task in job.waiting}

    def start(self) -> None:
        if job := self.pick("PENDING"):
            self.model.start(job)

    def end(self) -> None:
        if job := self.pick("RUNNING"):
            state = self.chance.choice(["COMPLETED", "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"])
            self.model.end(job, state, 3 if state == "FAILED" else 0)

    def requeue(self) -> None:
        if job := self.pick("RUNNING"):
            self.model.requeue(job, self.chance.choice(["", "PREEMPTED", "NODE_FAIL"]))

    def break_a_daemon(self) -> None:
        self.model.is_up[self.chance.choice(list(self.model.is_up))] = False

    def mend(self) -> None:
        for name in self.model.is_up:
            self.model.is_up[name] = True
        self.model.drops_lists = False

    def upgrade(self) -> None:
        self.model.version = NEW

    def wait_long(self) -> None:
        self.model.pass_time(self.chance.choice([12.0, 65.0, 200.0]))

    def drop_lists(self) -> None:
        self.model.drops_lists = True

    def queue(self) -> None:
        try:
            jobs = self.slurm.queue()
        except SchedulerError:
            return
        live = {str(job.job_id) for job in self.model.live.values() if not job.is_over}
        if self.slurm._cache.listed_at == self.model.now and self.model.is_up["slurmctld"]:
            assert len(jobs) == len(live)

    def check(self) -> None:
        before = len(self.model.calls)
        try:
            statuses = self.slurm.status(list(self.following))
        except SchedulerError:
            assert not all(self.model.is_up.values()) or self.model.drops_lists, self.log
            return
        calls = self.model.calls[before:]
        for scheduler_id in list(self.following):
            self.compare(scheduler_id, statuses.get(scheduler_id))
        changes = len(self.following) + 3 * MAX_SINGLE_REQUESTS
        assert len(calls) <= 8 + changes, calls

    def compare(self, scheduler_id: str, status: JobStatus | None) -> None:
        truth = self.model.all[scheduler_id]
        assert status is not None or not truth.runs[-1].is_accounted, (scheduler_id, truth, self.log)
        assert status is not None or not truth.is_over or truth.job_id not in self.model.live, (scheduler_id, self.log)
        if status is None or status.state == UNKNOWN:
            return
        reports = (status.scheduler_id, status.state, status.restart_count)
        where = (scheduler_id, truth, status, self.model.version, self.log[-20:])
        if reports != (
            scheduler_id,
            truth.state.lower(),
            truth.restart,
        ):  # an older truth, where Slurm cannot be reached yet
            assert status.state not in ENDED, where
            raise AssertionError(where)
        assert status.key == truth.key
        if truth.is_over and status.exit_code is not None:
            assert status.exit_code == truth.exit_code, where
        assert status.previous_end in {"", truth.before}, where
        if status.state in ENDED:
            self.ended[scheduler_id] = status
            del self.following[scheduler_id]


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("seed", range(8))
def test_a_random_walk(seed: int, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(seed, version, monkeypatch)
    for _ in range(STEPS):
        walk.step()
        walk.check()
    walk.mend()
    for _ in range(30):  # once all is well, every end is reported
        walk.model.pass_time(4.0)
        walk.check()
    left = {name for name in walk.following if walk.model.all[name].is_over}
    assert not left
    assert walk.ended
    cache, past = walk.slurm._cache, walk.slurm._past
    assert len(past.ended) + len(past.pending) + len(past.previous_runs) <= 3 * len(walk.following)
    assert set(cache.records) == set(map(str, walk.model.live)) or walk.model.version == OLD
    assert len(cache.job_ids) <= len(cache.records)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Walk:
    return Walk(0, NEW, monkeypatch)


def test_when_nothing_changes_a_single_call_is_made(quiet: Walk) -> None:
    ids = [quiet.model.start(quiet.model.submit()).name for _ in range(15)]
    assert {item.state for item in quiet.slurm.status(ids).values()} == {"running"}
    quiet.model.calls.clear()
    for _ in range(10):
        quiet.model.pass_time(2)
        quiet.slurm.status(ids)
    assert len(quiet.model.calls) == 10
    quiet.model.end(quiet.model.live[3], "COMPLETED")
    quiet.model.pass_time(2)
    quiet.model.calls.clear()
    assert quiet.slurm.status(ids)["3"].state == "completed"
    assert quiet.model.calls == [f"/slurm/{NEW}/jobs/state", f"/slurm/{NEW}/job/3"]


@pytest.mark.parametrize("version", [OLD, NEW])
def test_a_hold_and_its_release_are_observed_within_two_polls(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(0, version, monkeypatch)
    model, jobs = walk.model, [walk.model.submit() for _ in range(2 * MAX_PENDING_REFRESHED)]
    others = [model.submit() for _ in range(200)]  # not followed by us
    ids = [job.name for job in jobs]
    walk.slurm.status(ids)
    for reason in ("JobHeldUser", "None"):
        for job in jobs:
            job.reason = reason
        model._touch()
        model.calls.clear()
        for _ in range(2):
            model.pass_time(2)
            found = walk.slurm.status(ids)
        assert {item.reason for item in found.values()} == {"" if reason == "None" else reason}
        assert len(model.calls) <= 2 * (1 + MAX_PENDING_REFRESHED)
    for job in others[:MAX_SINGLE_REQUESTS]:
        model.start(job)
    model.pass_time(2)
    model.calls.clear()
    walk.slurm.status(ids)
    assert len(model.calls) <= 1 + MAX_SINGLE_REQUESTS, "a tick of many changes costs no more than before"


def test_many_changes_take_a_single_list(quiet: Walk) -> None:
    ids = [quiet.model.submit().name for _ in range(200)]
    quiet.slurm.status(ids)
    for job in list(quiet.model.live.values())[:100]:
        quiet.model.start(job)
    quiet.model.pass_time(2)
    quiet.model.calls.clear()
    assert [item.state for item in quiet.slurm.status(ids).values()].count("running") == 100
    assert quiet.model.calls == [f"/slurm/{NEW}/jobs/state", f"/slurm/{NEW}/jobs"]


@pytest.mark.parametrize("version", [OLD, NEW])
def test_many_forgotten_jobs_are_not_requested_all_at_once(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(1, version, monkeypatch)
    jobs = [walk.model.submit() for _ in range(200)]
    ids = [job.name for job in jobs]
    for job in jobs[150:]:
        walk.model.end(walk.model.start(job), "COMPLETED")
    walk.model.pass_time(1)
    walk.model.live.clear()  # slurmctld has lost its state: most of them never end for the accounts
    walk.model._touch()
    found: dict[str, JobStatus] = {}
    for _ in range(11):
        walk.model.pass_time(2)
        walk.model.calls.clear()
        found = walk.slurm.status(ids)
        assert len(walk.model.calls) <= 24
    assert set(found) == set(ids)
    assert [found[item].state for item in ids] == [UNKNOWN] * 150 + ["completed"] * 50


def test_slurmdbd_away_costs_a_single_call(quiet: Walk) -> None:
    jobs = [quiet.model.submit() for _ in range(60)]
    quiet.slurm.status([job.name for job in jobs])
    quiet.model.live.clear()
    quiet.model.is_up["slurmdbd"] = False
    quiet.model.pass_time(2)
    quiet.model.calls.clear()
    statuses = quiet.slurm.status([job.name for job in jobs])
    assert {item.state for item in statuses.values()} == {UNKNOWN}
    assert len(statuses) == 60
    assert len(quiet.model.calls) == 2


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("why", ["PREEMPTED", "NODE_FAIL", ""])
def test_why_the_run_before_ended(version: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where the accounts know, a plain requeue included; also of one that slurmctld has forgotten."""
    walk = Walk(0, version, monkeypatch)
    job = walk.model.start(walk.model.submit())
    walk.model.requeue(job, why)
    walk.model.pass_time(1)
    status = walk.slurm.status(["1"])["1"]
    assert (status.state, status.restart_count, status.previous_end) == ("pending", 1, why.lower())
    walk.model.pass_time(20)
    walk.model.end(walk.model.start(job), "FAILED", 3)
    walk.model.pass_time(2)
    walk.model.pass_time(200)
    for slurm in (walk.slurm, Slurm(walk.slurm.rest, tokens=FixedToken(), user="portal")):
        status = slurm.status(["1"])["1"]
        assert (status.state, status.restart_count, status.previous_end) == ("failed", 1, why.lower())


@pytest.mark.parametrize("version", [OLD, NEW])
def test_a_failed_job_was_not_restarted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(0, version, monkeypatch)
    walk.model.end(walk.model.start(walk.model.submit()), "FAILED", 3)
    walk.model.pass_time(1)
    walk.model.pass_time(100)
    status = walk.slurm.status(["1"])["1"]
    assert (status.state, status.restart_count, status.previous_end) == ("failed", 0, "")


@pytest.mark.parametrize("version", [OLD, NEW])
def test_a_reinstalled_slurm_gives_ids_to_other_jobs(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(0, version, monkeypatch)
    walk.model.end(walk.model.start(walk.model.submit()), "FAILED", 3)
    walk.model.pass_time(1)
    walk.model.pass_time(100)
    assert walk.slurm.status(["1"])["1"].state == "failed"
    walk.slurm.status([])
    walk.model.next_id = 1
    job = walk.model.submit()
    job.key = "f" * 16
    walk.model.pass_time(2)
    assert walk.slurm.status(["1"])["1"].state == "pending"
    walk.model.end(walk.model.start(job), "COMPLETED")
    walk.model.pass_time(1)
    walk.model.pass_time(100)
    status = walk.slurm.status(["1"])["1"]
    assert (status.state, status.key, status.restart_count) == ("completed", "f" * 16, 0)


def test_a_list_that_failed_is_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """v0.0.38 reports what changed since the last list that arrived, not since the last request."""
    walk = Walk(0, OLD, monkeypatch)
    job = walk.model.submit()
    walk.slurm.status(["1"])
    walk.model.pass_time(10)
    walk.model.start(job)
    walk.model.pass_time(3)
    walk.model.drops_lists = True
    with pytest.raises(SchedulerError):
        walk.slurm.status(["1"])
    walk.model.drops_lists = False
    walk.model.pass_time(30)
    assert walk.slurm.status(["1"])["1"].state == "running"


def test_without_slurm_s_clock_everything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(0, OLD, monkeypatch)
    monkeypatch.setattr(walk.slurm.rest, "clock", lambda: None)
    job = walk.model.submit()
    walk.slurm.status(["1"])
    walk.model.pass_time(3)
    walk.model.start(job)
    assert walk.slurm.status(["1"])["1"].state == "running"


def test_an_old_slurm_reports_only_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(0, OLD, monkeypatch)
    walk.model.submit()
    for _ in range(2):  # what changed in the second of the first list is reported twice
        walk.slurm.status(["1"])
        walk.model.pass_time(5)
    listed_at = walk.slurm._cache.listed_at
    walk.model.calls.clear()
    walk.slurm.status(["1"])
    assert walk.model.calls == [f"/slurm/{OLD}/diag", f"/slurm/{OLD}/jobs"]
    assert walk.slurm._cache.listed_at == listed_at


def test_places_of_tasks_are_forgotten_with_them(quiet: Walk) -> None:
    for _ in range(5):
        array = quiet.model.submit(tasks=3)
        while array.state == "PENDING":
            quiet.model.end(quiet.model.start(array), "COMPLETED")
            quiet.slurm.status([])
        quiet.model.pass_time(100)
        quiet.slurm.status([])
    cache = quiet.slurm._cache
    assert (cache.job_ids, cache.records, cache.state_words) == ({}, {}, {})


@pytest.mark.parametrize("version", [OLD, NEW])
def test_a_restart_is_not_reported_before_its_reason(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the accounts stay silent: then without one."""
    walk = Walk(0, version, monkeypatch)
    job = walk.model.start(walk.model.submit())
    walk.model.pass_time(2)
    walk.slurm.status(["1"])
    walk.model.is_up["slurmdbd"] = False
    walk.model.requeue(job, "PREEMPTED")
    walk.model.pass_time(1)
    assert walk.slurm.status(["1"])["1"].state == UNKNOWN
    walk.model.calls.clear()
    walk.model.pass_time(1)
    assert walk.slurm.status(["1"])["1"].state == UNKNOWN
    assert not [path for path in walk.model.calls if "slurmdb" in path]  # it did not answer a second ago
    walk.model.is_up["slurmdbd"] = True
    walk.model.pass_time(5)
    status = walk.slurm.status(["1"])["1"]
    assert (status.state, status.previous_end) == ("pending", "preempted")
    walk.model.pass_time(20)
    walk.model.is_up["slurmdbd"] = False
    walk.model.requeue(walk.model.start(job), "NODE_FAIL")
    reports = []
    for _ in range(6):
        walk.model.pass_time(2)
        reports.append(walk.slurm.status(["1"])["1"])
    assert [item.state for item in reports] == [UNKNOWN] * 4 + ["pending"] * 2
    assert (reports[-1].restart_count, reports[-1].previous_end) == (2, "")
