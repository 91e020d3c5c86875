"""Slurm's REST API as typed calls: dataclasses in and out, the same for every version from v0.0.38 on."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from nodes.schedulers.base import UNKNOWN, Listing, NodeStatus, SchedulerError, SlurmStep, Submission
from nodes.schedulers.cluster import Accounts, Association, License, Partition, QueuedJob, Reservation
from nodes.schedulers.slurm import limits, shapes
from nodes.schedulers.slurm.http import (
    NOTHING_FOUND,
    UNKNOWN_JOB,
    SlurmError,
    SlurmHttp,
    is_permanent,
)
from nodes.schedulers.slurm.listed import listed
from nodes.schedulers.slurm.request import request
from nodes.schedulers.slurm.served import Json, Service, UnknownVersion
from nodes.schedulers.slurm.shapes import Record
from nodes.schedulers.slurm.values import at, integer, moment, objects, text, words
from nodes.schedulers.slurm.versions import ACCOUNTS_BY_USER, BATCH_SIGNALS, BY_TASK, Version

logger = logging.getLogger(__name__)
T = TypeVar("T")
ALREADY_ENDED = 2021  # ESLURM_ALREADY_DONE
_ID = re.compile(r"[0-9]{1,10}(_[0-9]{1,9})?\Z", re.ASCII)
_LISTED_ID = re.compile(r"([1-9][0-9]{0,9})([_+][0-9\[].*)?", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class JobList:
    """Every job that slurmctld knows, read as far as somebody wants to know."""

    _jobs: Sequence[object]

    def records(self) -> Listing[Record]:
        return _each(shapes.record, self._jobs)

    def default_partition(self) -> str:
        """The partition into which Slurm put a job that named none; "" where none tells."""
        jobs = objects(self._jobs)
        put = (job.get("partition") for job in jobs if "USING_DEFAULT_PARTITION" in words(job.get("flags")))
        return next((name for name in map(text, put) if name and "," not in name), "")

    def both(self) -> Listing[tuple[Record, QueuedJob]]:
        """The two of one job together."""

        def read(raw: Mapping[str, object]) -> tuple[Record, QueuedJob]:
            told = shapes.record(raw)
            return told, shapes.queued(raw, told)

        return _each(read, self._jobs)


@dataclass(frozen=True)
class Run:
    """One run of a job as the accounts keep it; a requeued job has several, the first one first.

    `record.status.before` is why this very run ended, where it was requeued.
    """

    record: Record
    steps: tuple[SlurmStep, ...]


@dataclass(frozen=True)
class ListedStates:
    """The short list of jobs: state words by the id that Slurm lists. `unreadable` counts rows without such an id."""

    words: Mapping[str, tuple[str, ...]]
    unreadable: int

    def by_own_id(self) -> dict[str, tuple[str, ...]]:
        return {own_id_of(listed): words for listed, words in self.words.items()}


class SlurmRest:
    def __init__(self, http: SlurmHttp) -> None:
        self.http = http

    @property
    def version(self) -> Version:
        return self.http.served.slurm

    @property
    def tells_states(self) -> bool:
        """Whether it has the short answer to "which job is in which state" (v0.0.40)."""
        return self.http.served.has("jobs/state")

    @property
    def updates_nodes(self) -> bool:
        return self.http.served.has("node/{node_name}", "post")

    @property
    def has_accounts(self) -> bool:
        return self.http.served.slurmdb is not None

    def submit(self, asked: Submission, script: str, *, array: str = "") -> str:
        """Slurm's id of a new job. What it says beside an id is a remark, not a refusal."""
        answer = self.http.post(
            "job/submit", lambda version: request(asked, script, version, array=array), user=asked.user
        )
        job_id = integer(answer.get("job_id")) or integer(at(answer, "result", "job_id"))
        if not job_id:
            raise SlurmError(f"Slurm took the job and gave it no id: {_said(answer)}")
        return str(job_id)

    def states(self) -> ListedStates:
        """Return every job's state words; waiting tasks of an array and heterogeneous components one by one."""

        def read(row: Mapping[str, object]) -> tuple[str, tuple[str, ...]]:
            listed = str(row.get("job_id"))
            own_id_of(listed)
            return listed, words(row.get("state"))

        found = _each(read, _list(self.http.get("jobs/state") or {}, "jobs"))
        return ListedStates(dict(found), found.unreadable)

    def jobs(self, *, since: float | None = None, user: str = "") -> JobList | None:
        """All of them; None if nothing has changed `since`, a time of Slurm's own clock."""
        query = {} if since is None else {"update_time": str(int(since))}
        answer = self.http.get("jobs", query, user=user, decode=listed)
        if answer is None or (since is not None and not answer.get("jobs") and _is_unchanged(answer)):
            return None
        jobs = JobList(_list(answer, "jobs"))
        if self.http.served.is_unknown:
            records = jobs.records()
            self._check_shapes("jobs", records.unreadable, [record.status.state for record in records])
        return jobs

    def details(self, job_id: str) -> JobList:
        """One job, or all that is there of an array; none where slurmctld has forgotten it."""
        return JobList(self._of_job(job_id, service="slurm"))

    def runs(self, job_id: str) -> list[Run]:
        """What the accounts keep of a job, run by run; none where they know none."""
        return _in_order(self._of_job(job_id, service="slurmdb"))

    def accounted(self, *, user: str, since: float) -> list[Record]:
        """What the accounts keep of one person's jobs that were there since then."""
        query = {"start_time": f"uts{int(since)}", "skip_steps": "true"}
        if self.version >= ACCOUNTS_BY_USER:
            query["users"] = user
        answer = self.http.get("jobs", query, user=user, service="slurmdb") or {}
        return [found for found in _each(shapes.accounted, _list(answer, "jobs")) if found.user in {user, ""}]

    def cancel(self, job_id: str, *, user: str) -> None:
        self._end(job_id, user, {})

    def signal(self, job_id: str, name: str, *, user: str) -> None:
        """Signals the batch script; up to v0.0.39 everything that it started, too."""
        flags = {"flags": "BATCH_JOB"} if self.version >= BATCH_SIGNALS else {}
        self._end(job_id, user, {"signal": name, **flags})

    def release(self, job_id: str, *, user: str) -> None:
        self.http.post(f"job/{job_id}", lambda _: {"hold": False}, user=user)

    def clock(self) -> float | None:
        """Return slurmctld's time, if it tells. slurmrestd sends no `Date` with its answers."""
        answer = self.http.get("diag") or {}
        return moment(at(answer, "statistics", "req_time"))

    def nodes(self) -> Listing[NodeStatus]:
        found = _each(shapes.node, _list(self.http.get("nodes") or {}, "nodes"))
        self._check_shapes("nodes", found.unreadable, [node.state for node in found])
        return found

    def partitions(self) -> Listing[Partition]:
        return _each(limits.partition, _list(self.http.get("partitions") or {}, "partitions"))

    def reservations(self) -> Listing[Reservation]:
        answer = self.http.get("reservations") or {}
        return _each(limits.reservation, answer.get("reservations"))

    def licenses(self) -> Listing[License]:
        answer = self.http.get("licenses") or {}
        found = _each(limits.license, answer.get("licenses"))
        return Listing(_added_up(found), unreadable=found.unreadable)

    def accounts(self) -> Accounts:
        answer = self.http.get("qos", service="slurmdb") or {}
        qos = _each(limits.qos, answer.get("qos") or answer.get("QOS"))
        answer = self.http.get("associations", service="slurmdb") or {}
        associations = _each(limits.association, answer.get("associations"))
        unreadable = qos.unreadable + associations.unreadable
        found: list[Association] = associations
        if self.http.served.has("shares"):
            shares = _each(limits.share, at(self.http.get("shares"), "shares", "shares"))
            unreadable += shares.unreadable
            found = _with_shares(associations, dict(shares))
        return Accounts(qos=tuple(qos), associations=tuple(found), unreadable=unreadable)

    def _check_shapes(self, name: str, unreadable: int, states: Sequence[str]) -> None:
        """Refuse a version that nobody has tested where its answers turn out to be of another form.

        Records that all read as nothing would otherwise show a cluster without nodes, or jobs in no state.
        """
        if not self.http.served.is_unknown or not (unreadable or states):
            return
        if all(state == UNKNOWN for state in states):
            raise UnknownVersion(self.version, f"its {name} cannot be read")

    def update_node(self, name: str, *, state: str, reason: str = "") -> None:
        body: dict[str, Any] = {"state": [state]}
        if reason:
            body["reason"] = reason
        self.http.post(f"node/{name}", lambda _: body)

    def _of_job(self, job_id: str, *, service: Service) -> list[object]:
        try:
            return _list(self.http.get(f"job/{job_id}", service=service) or {}, "jobs")
        except SlurmError as error:
            if error.number in UNKNOWN_JOB:
                return []
            raise

    def _end(self, job_id: str, user: str, query: dict[str, str]) -> None:
        is_task_to_old = "_" in job_id and self.version < BY_TASK  # which reads 17, the whole array
        if not _ID.match(job_id) or is_task_to_old:
            raise SchedulerError(f"{job_id!r} is not the id of a Slurm job.", permanent=True)
        try:
            answer = self.http.delete(f"job/{job_id}", query, user=user)
            for told in objects(answer.get("status")):  # v0.0.42 refuses with HTTP 200
                if number := integer(at(told, "error", "code")):
                    said = text(at(told, "error", "message")) or text(at(told, "error", "string"))
                    raise SlurmError(f"Slurm error {number}: {said}", permanent=is_permanent(number), number=number)
        except SlurmError as error:
            if error.number not in {*UNKNOWN_JOB, ALREADY_ENDED}:
                raise


def _added_up(rows: Iterable[License]) -> Iterable[License]:
    """Add up rows of one name: since Slurm 25.05 a licence may be counted for each group of nodes by itself."""
    found: dict[str, License] = {}
    for row in rows:
        if (other := found.get(row.name)) is not None:
            row = replace(
                row, total=row.total + other.total, used=row.used + other.used, reserved=row.reserved + other.reserved
            )
        found[row.name] = row
    return found.values()


def own_id_of(listed: str) -> str:
    """Return the number in "17", "17_3" or "17+0", the ids of /jobs/state; raise ValueError for anything else.

    Before "_" stands the array, or, once a task runs, its own id; before "+" the component's own id, while Slurm's
    commands write the heterogeneous job's there.
    """
    if (found := _LISTED_ID.fullmatch(listed)) is None:
        raise ValueError(f"{listed[:40]!r} is not the id of a job")
    return found[1]


def _in_order(jobs: list[object]) -> list[Run]:
    """The runs of one job: v0.0.38 does not number them, but tells when each was submitted and began."""
    told = _each(lambda raw: (shapes.accounted(raw), shapes.steps(raw)), jobs)
    told.sort(key=lambda run: _place(run[0]))
    runs: list[Run] = []
    for found, ended_steps in told:
        earlier = runs[-1].record if runs and _is_same(runs[-1].record, found) else None
        count = max(found.status.restart_count, earlier.status.restart_count + 1 if earlier else 0)
        runs.append(Run(replace(found, status=replace(found.status, restart_count=count)), ended_steps))
    return runs


def _place(one: Record) -> tuple[str, float, int, float]:
    """A key that sorts by time; of two in the same second the one that has not started is the later one."""
    status = one.status
    return one.own_id, status.submitted_at or 0, status.restart_count, status.started_at or float("inf")


def _is_same(one: Record, other: Record) -> bool:
    """Whether both tell of one job: a Slurm that was set up anew counts from 1 again, and gives ids to others."""
    mine, others = one.status.keys, other.status.keys
    return one.own_id == other.own_id and (mine == others or not mine.isdisjoint(others))


def _with_shares(
    found: list[Association], shares: Mapping[tuple[str, str], tuple[float | None, float | None]]
) -> list[Association]:
    nothing = (None, None)
    return [
        replace(one, fair_share=shares.get((one.account, one.user), nothing)[0], usage=shares.get(
            (one.account, one.user), nothing)[1])
        for one in found
    ]  # fmt: skip


def _each(read: Callable[[Mapping[str, object]], T], raws: object) -> Listing[T]:
    """Read every record of a list; one that cannot be read is counted and must not hide the others."""
    found = Listing[T]()
    for raw in raws if isinstance(raws, list | tuple) else ():
        try:
            if not isinstance(raw, Mapping):
                raise TypeError(f"{type(raw).__name__} instead of an object")
            found.append(read(raw))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            found.unreadable += 1
            logger.info("left out a record of Slurm's: %s: %.200r", error, raw)
    return found


def _list(answer: Json, name: str) -> list[object]:
    """The list that an answer is about; an answer of 200 that has errors instead of it is an error."""
    found, errors = answer.get(name), objects(answer.get("errors"))
    is_empty = found == [] and all(integer(error.get("error_number")) == NOTHING_FOUND for error in errors)
    if not isinstance(found, list) or not (found or is_empty):
        raise SchedulerError(f"Slurm's answer has no {name}: {_said(answer)}")
    return found


def _said(answer: Json) -> str:
    lines = [text(one.get("error")) or text(one.get("description")) for one in objects(answer.get("errors"))]
    return "; ".join(filter(None, lines)) or "it gave no reason"


def _is_unchanged(answer: Json) -> bool:
    return any("No job changes" in text(one.get("description")) for one in objects(answer.get("warnings")))
