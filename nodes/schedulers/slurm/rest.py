"""Call Slurm's REST API with typed functions that are the same for every version from v0.0.38 on."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from nodes.schedulers.base import UNKNOWN, Listing, NodeStatus, SchedulerError, SlurmStep, Submission
from nodes.schedulers.cluster import (
    AccountsInfo,
    AssociationInfo,
    LicenseInfo,
    PartitionInfo,
    QueuedJobInfo,
    ReservationInfo,
)
from nodes.schedulers.slurm import limits, shapes
from nodes.schedulers.slurm.http import (
    NOTHING_FOUND,
    UNKNOWN_JOB,
    SlurmError,
    SlurmHttp,
    is_permanent,
)
from nodes.schedulers.slurm.listed import decode_job_list
from nodes.schedulers.slurm.request import request
from nodes.schedulers.slurm.served import Json, Service, UntestedVersion
from nodes.schedulers.slurm.shapes import JobRecord
from nodes.schedulers.slurm.values import at, integer, moment, objects, text, words
from nodes.schedulers.slurm.versions import ACCOUNTS_BY_USER, BATCH_SIGNALS, CANCEL_BY_TASK, Version

logger = logging.getLogger(__name__)
T = TypeVar("T")
ALREADY_ENDED = 2021  # ESLURM_ALREADY_DONE
_ID = re.compile(r"[0-9]{1,10}(_[0-9]{1,9})?\Z", re.ASCII)
_LISTED_ID = re.compile(r"([1-9][0-9]{0,9})([_+][0-9\[].*)?", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class JobList:
    """The jobs that slurmctld lists, parsed only as far as the caller needs."""

    _jobs: Sequence[object]

    def records(self) -> Listing[JobRecord]:
        return _parse_all(shapes.record, self._jobs)

    def default_partition(self) -> str:
        """Return the partition that Slurm chose for a job that named none; "" if there is no such job."""
        jobs = objects(self._jobs)
        put = (job.get("partition") for job in jobs if "USING_DEFAULT_PARTITION" in words(job.get("flags")))
        return next((name for name in map(text, put) if name and "," not in name), "")

    def records_with_queue(self) -> Listing[tuple[JobRecord, QueuedJobInfo]]:
        """Return each job as record and queue entry."""

        def read(raw: Mapping[str, object]) -> tuple[JobRecord, QueuedJobInfo]:
            record = shapes.record(raw)
            return record, shapes.queued(raw, record)

        return _parse_all(read, self._jobs)


@dataclass(frozen=True)
class AccountedRun:
    """A single run of a job in accounting; a requeued job has several, the first one first.

    `record.status.previous_end` is why this very run ended, if it was requeued.
    """

    record: JobRecord
    steps: tuple[SlurmStep, ...]


@dataclass(frozen=True)
class ListedStates:
    """The short list of jobs: state words by the id that Slurm lists.

    `unreadable` counts rows without such an id.
    """

    words: Mapping[str, tuple[str, ...]]
    unreadable: int

    def by_job_id(self) -> dict[str, tuple[str, ...]]:
        return {job_id_of(listed): words for listed, words in self.words.items()}


class SlurmRest:
    """The REST calls to a slurmrestd, as typed functions."""

    def __init__(self, http: SlurmHttp) -> None:
        self.http = http

    @property
    def version(self) -> Version:
        return self.http.api.slurm

    @property
    def has_state_list(self) -> bool:
        """Return whether it has the short list of job states, /jobs/state (v0.0.40)."""
        return self.http.api.has("jobs/state")

    @property
    def can_update_nodes(self) -> bool:
        return self.http.api.has("node/{node_name}", "post")

    @property
    def has_accounting(self) -> bool:
        return self.http.api.slurmdb is not None

    def submit(self, submission: Submission, script: str, *, array: str = "") -> str:
        """Submit a job and return Slurm's id. Messages next to an id are remarks, not refusals."""
        answer = self.http.post(
            "job/submit", lambda version: request(submission, script, version, array=array), user=submission.user
        )
        job_id = integer(answer.get("job_id")) or integer(at(answer, "result", "job_id"))
        if not job_id:
            raise SlurmError(f"Slurm accepted the job but returned no id: {_errors_in(answer)}")
        return str(job_id)

    def states(self) -> ListedStates:
        """Return every job's state words; pending array tasks and heterogeneous components are separate rows."""

        def read(row: Mapping[str, object]) -> tuple[str, tuple[str, ...]]:
            listed_id = str(row.get("job_id"))
            job_id_of(listed_id)
            return listed_id, words(row.get("state"))

        found = _parse_all(read, _list(self.http.get("jobs/state") or {}, "jobs"))
        return ListedStates(dict(found), found.unreadable)

    def jobs(self, *, since: float | None = None, user: str = "") -> JobList | None:
        """Return all jobs; None if nothing has changed `since`, a time by Slurm's clock."""
        query = {} if since is None else {"update_time": str(int(since))}
        answer = self.http.get("jobs", query, user=user, decode=decode_job_list)
        if answer is None or (since is not None and not answer.get("jobs") and _is_unchanged(answer)):
            return None
        jobs = JobList(_list(answer, "jobs"))
        if self.http.api.is_untested:
            records = jobs.records()
            self._check_shapes("jobs", records.unreadable, [record.status.state for record in records])
        return jobs

    def details(self, job_id: str) -> JobList:
        """Return one job, or all of an array; empty if slurmctld has forgotten it."""
        return JobList(self._of_job(job_id, service="slurm"))

    def runs(self, job_id: str) -> list[AccountedRun]:
        """Return a job's runs from accounting, in order; empty if it knows none."""
        return _ordered_runs(self._of_job(job_id, service="slurmdb"))

    def accounted(self, *, user: str, since: float) -> list[JobRecord]:
        """Return one user's jobs in accounting that existed since then (Unix seconds)."""
        query = {"start_time": f"uts{int(since)}", "skip_steps": "true"}
        if self.version >= ACCOUNTS_BY_USER:
            query["users"] = user
        answer = self.http.get("jobs", query, user=user, service="slurmdb") or {}
        return [found for found in _parse_all(shapes.accounted, _list(answer, "jobs")) if found.user in {user, ""}]

    def cancel(self, job_id: str, *, user: str) -> None:
        self._end(job_id, user, {})

    def signal(self, job_id: str, name: str, *, user: str) -> None:
        """Signal the batch script; up to v0.0.39 also everything that it started."""
        flags = {"flags": "BATCH_JOB"} if self.version >= BATCH_SIGNALS else {}
        self._end(job_id, user, {"signal": name, **flags})

    def release(self, job_id: str, *, user: str) -> None:
        self.http.post(f"job/{job_id}", lambda _: {"hold": False}, user=user)

    def clock(self) -> float | None:
        """Return slurmctld's time if it reports it. slurmrestd's responses have no `Date` header."""
        answer = self.http.get("diag") or {}
        return moment(at(answer, "statistics", "req_time"))

    def nodes(self) -> Listing[NodeStatus]:
        found = _parse_all(shapes.node, _list(self.http.get("nodes") or {}, "nodes"))
        self._check_shapes("nodes", found.unreadable, [node.state for node in found])
        return found

    def partitions(self) -> Listing[PartitionInfo]:
        return _parse_all(limits.partition, _list(self.http.get("partitions") or {}, "partitions"))

    def reservations(self) -> Listing[ReservationInfo]:
        answer = self.http.get("reservations") or {}
        return _parse_all(limits.reservation, answer.get("reservations"))

    def licenses(self) -> Listing[LicenseInfo]:
        answer = self.http.get("licenses") or {}
        found = _parse_all(limits.license, answer.get("licenses"))
        return Listing(_merged(found), unreadable=found.unreadable)

    def accounts(self) -> AccountsInfo:
        answer = self.http.get("qos", service="slurmdb") or {}
        qos = _parse_all(limits.qos, answer.get("qos") or answer.get("QOS"))
        answer = self.http.get("associations", service="slurmdb") or {}
        associations = _parse_all(limits.association, answer.get("associations"))
        unreadable = qos.unreadable + associations.unreadable
        found: list[AssociationInfo] = associations
        if self.http.api.has("shares"):
            shares = _parse_all(limits.share, at(self.http.get("shares"), "shares", "shares"))
            unreadable += shares.unreadable
            found = _with_shares(associations, dict(shares))
        return AccountsInfo(qos=tuple(qos), associations=tuple(found), unreadable=unreadable)

    def _check_shapes(self, name: str, unreadable: int, states: Sequence[str]) -> None:
        """Reject the responses of an untested version whose form turns out to be different.

        Records that all parse to nothing would otherwise show a cluster without nodes, or jobs without a state.
        """
        if not self.http.api.is_untested or not (unreadable or states):
            return
        if all(state == UNKNOWN for state in states):
            raise UntestedVersion(self.version, f"its {name} cannot be read")

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
        is_task_and_too_old = "_" in job_id and self.version < CANCEL_BY_TASK  # which would cancel 17, the whole array
        if not _ID.match(job_id) or is_task_and_too_old:
            raise SchedulerError(f"{job_id!r} is not the id of a Slurm job.", permanent=True)
        try:
            answer = self.http.delete(f"job/{job_id}", query, user=user)
            for entry in objects(answer.get("status")):  # v0.0.42 refuses with HTTP 200
                if number := integer(at(entry, "error", "code")):
                    message = text(at(entry, "error", "message")) or text(at(entry, "error", "string"))
                    raise SlurmError(f"Slurm error {number}: {message}", permanent=is_permanent(number), number=number)
        except SlurmError as error:
            if error.number not in {*UNKNOWN_JOB, ALREADY_ENDED}:
                raise


def _merged(rows: Iterable[LicenseInfo]) -> Iterable[LicenseInfo]:
    """Merge rows of one name: since Slurm 25.05 a license may be counted per group of nodes."""
    found: dict[str, LicenseInfo] = {}
    for row in rows:
        if (other := found.get(row.name)) is not None:
            row = replace(
                row, total=row.total + other.total, used=row.used + other.used, reserved=row.reserved + other.reserved
            )
        found[row.name] = row
    return found.values()


def job_id_of(listed: str) -> str:
    """Return the job id in "17", "17_3" or "17+0", the ids of /jobs/state; raise ValueError for anything else.

    Before "_" is the array's id, or once a task runs, the task's own; before "+" is the component's own id, where
    Slurm's commands write the id of the heterogeneous job.
    """
    if (found := _LISTED_ID.fullmatch(listed)) is None:
        raise ValueError(f"{listed[:40]!r} is not the id of a job")
    return found[1]


def _ordered_runs(jobs: list[object]) -> list[AccountedRun]:
    """Return the runs of one job in order. v0.0.38 does not number them, but gives submit and start times."""
    accounted = _parse_all(lambda raw: (shapes.accounted(raw), shapes.steps(raw)), jobs)
    accounted.sort(key=lambda run: _sort_key(run[0]))
    runs: list[AccountedRun] = []
    for found, ended_steps in accounted:
        earlier = runs[-1].record if runs and _is_same(runs[-1].record, found) else None
        count = max(found.status.restart_count, earlier.status.restart_count + 1 if earlier else 0)
        runs.append(AccountedRun(replace(found, status=replace(found.status, restart_count=count)), ended_steps))
    return runs


def _sort_key(record: JobRecord) -> tuple[str, float, int, float]:
    """Return a sort key by time; within one second, the run that has not started is the later one."""
    status = record.status
    return record.job_id, status.submitted_at or 0, status.restart_count, status.started_at or float("inf")


def _is_same(record: JobRecord, other: JobRecord) -> bool:
    """Return whether both records are of one job: a reinstalled Slurm reuses ids."""
    keys, other_keys = record.status.keys, other.status.keys
    return record.job_id == other.job_id and (keys == other_keys or not keys.isdisjoint(other_keys))


def _with_shares(
    found: list[AssociationInfo], shares: Mapping[tuple[str, str], tuple[float | None, float | None]]
) -> list[AssociationInfo]:
    missing = (None, None)
    factors = [shares.get((association.account, association.user), missing) for association in found]
    return [
        replace(association, fair_share=fair_share, usage=usage)
        for association, (fair_share, usage) in zip(found, factors, strict=True)
    ]


def _parse_all(read: Callable[[Mapping[str, object]], T], raws: object) -> Listing[T]:
    """Parse every record of a list; one that cannot be parsed is counted and does not hide the others."""
    found = Listing[T]()
    for raw in raws if isinstance(raws, list | tuple) else ():
        try:
            if not isinstance(raw, Mapping):
                raise TypeError(f"{type(raw).__name__} instead of an object")
            found.append(read(raw))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            found.unreadable += 1
            logger.info("skipped an unreadable record of Slurm: %s: %.200r", error, raw)
    return found


def _list(answer: Json, name: str) -> list[object]:
    """Return the list in a response; a response of HTTP 200 that has errors instead of it raises."""
    found, errors = answer.get(name), objects(answer.get("errors"))
    is_empty = found == [] and all(integer(error.get("error_number")) == NOTHING_FOUND for error in errors)
    if not isinstance(found, list) or not (found or is_empty):
        raise SchedulerError(f"Slurm's response has no {name}: {_errors_in(answer)}")
    return found


def _errors_in(answer: Json) -> str:
    lines = [text(error.get("error")) or text(error.get("description")) for error in objects(answer.get("errors"))]
    return "; ".join(filter(None, lines)) or "it gave no reason"


def _is_unchanged(answer: Json) -> bool:
    return any("No job changes" in text(warning.get("description")) for warning in objects(answer.get("warnings")))
