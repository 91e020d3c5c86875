"""Why a job waits: what blocks it, who is ahead, when it should start, and what would start now. Pure.

    why = explain(Waiting(spec=…, request=…, reason="Resources", scheduler_id="77"), cluster)

The scheduler's word comes first; what Vigil counts itself is beside it, as the scheduler last told of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from jobs.spec import JobSpec
from jobs.why import limits, stuck
from jobs.why.blocks import Block, Facts, QueueAhead, word_of
from jobs.why.limits import Usage
from jobs.why.reasons import explained
from jobs.why.variants import Outcome, Variant, propose
from nodes.schedulers.cluster import QueuedJobInfo
from nodes.scheduling import licenses
from nodes.scheduling.backfill import Ahead, after, held_back
from nodes.scheduling.capacity import Cluster, Request, Seat, look, starts, survey
from vigil_core import formatting

# Slurm's words for one that waits for its turn; every other keeps a job from starting whatever is free.
IN_TURN = frozenset({"", "None", "Resources", "Priority"})
SAME_TIME_S = 60  # Slurm rounds a begin to its own clock's seconds


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A job that waits. `names`: what the reader may know of others, "#12 wren" by scheduler id."""

    spec: JobSpec | None  # None: of what Vigil did not submit, so that there are no variants to offer
    request: Request
    reason: str = ""  # the scheduler's word, or Vigil's own sentence
    scheduler_id: str = ""  # "": not handed over yet, or only a draft
    job_id: int | None = None  # Vigil's; None: only a draft
    you: str = ""  # the reader's own user name at the scheduler
    names: Mapping[str, str] = field(default_factory=dict)
    held_by_vigil: bool = False  # not handed over yet; `reason` says why


@dataclass(frozen=True, kw_only=True)
class Why:
    """`said`: the scheduler's word as it is; `meaning`: in plain words. Times are Unix seconds."""

    state: Literal["pending"] = "pending"
    said: str
    meaning: str
    starts_at: float | None
    blocks: tuple[Block, ...]
    ahead: QueueAhead
    never: bool  # as it is, it cannot start, however long it waits
    starts_on: tuple[str, ...]  # nodes with room for it, if nothing is in its way
    variants: tuple[Variant, ...]

    @property
    def sentence(self) -> str:
        """The first thing in the way, or what the scheduler's word means."""
        return self.blocks[0].text if self.blocks else self.meaning


def explain(waiting: Waiting, cluster: Cluster) -> Why:
    """Everything that is known of why it waits."""
    ids = (waiting.scheduler_id, waiting.scheduler_id.partition("_")[0])  # those of an array wait together
    own = next((job for known in ids for job in cluster.queue if known and job.scheduler_id == known), None)
    request = settled(waiting.request, own)
    reason = waiting.reason or (own.reason if own else "")
    board = _Board(request, cluster, ahead_of(own, request, cluster))
    ahead = _line(board.line, waiting.names)
    blocks = stuck.blocks(
        Facts(
            request=request,
            cluster=cluster,
            reason=reason,
            fit=look(request, board.seats, cluster),
            seats=board.seats,
            checks=board.checks(request),
            ahead=ahead,
            free_until=min((seat.until for seat in board.open(request, held=True)), default=inf),
            own=own,
            names=waiting.names,
            you=waiting.you,
            held_by_vigil=waiting.held_by_vigil,
            scheduler_id=waiting.scheduler_id,
            job_id=waiting.job_id,
        )
    )
    variants: tuple[Variant, ...] = ()
    if waiting.spec is not None and stuck.may_change(blocks):
        variants = propose(waiting.spec, request, cluster, board.attempt, board.ends())
    return Why(
        said=reason,
        meaning=explained(reason, waiting.scheduler_id, waiting.job_id),
        starts_at=own.starts_at if own and own.starts_at and own.starts_at > cluster.now else None,
        blocks=tuple(blocks),
        ahead=ahead,
        never=any(block.is_final for block in blocks),
        starts_on=board.nodes(request) if not blocks else (),
        variants=variants,
    )


def settled(request: Request, own: QueuedJobInfo | None) -> Request:
    """The request with what the scheduler made of it: the defaults that nobody asked for."""
    if own is None:
        return request
    return replace(
        request,
        user=own.user or request.user,
        account=own.account or request.account,
        qos=own.qos or request.qos,
        partition=own.partition or request.partition,
        licenses=own.licenses or request.licenses,
        begin_at=_begin_at(request, own),
    )


def _begin_at(request: Request, own: QueuedJobInfo) -> float | None:
    """Return when it may begin by the scheduler's current word: `scontrol update starttime=…` may have changed it.

    Slurm reports the start of a job that is to begin later as its begin, whatever else holds it back.
    """
    if word_of(own.reason) == stuck.BEGIN:
        return own.starts_at or request.begin_at
    if request.begin_at and own.starts_at and own.starts_at >= request.begin_at - SAME_TIME_S:
        return own.starts_at
    return None


def ahead_of(own: QueuedJobInfo | None, request: Request, cluster: Cluster) -> list[QueuedJobInfo]:
    """Jobs that get what is free before it, first one first; all that wait, for one that is not in the queue."""
    turn = _turn(own) if own else (inf, inf, inf)
    waiting = (job for job in cluster.queue if job.state == "pending" and job is not own)
    found = [job for job in waiting if _is_in_turn(job, cluster) and _turn(job) < turn]
    return sorted(found, key=_turn)


def _is_in_turn(job: QueuedJobInfo, cluster: Cluster) -> bool:
    """Whether it waits for room, and not for something else. One machine starts in order whatever is to begin now."""
    word = word_of(job.reason)
    return word != stuck.BEGIN if cluster.is_one_machine else word in IN_TURN


def _turn(job: QueuedJobInfo) -> tuple[float, float, float]:
    number = job.scheduler_id.partition("_")[0]
    return -job.priority, job.submitted_at or 0.0, float(number) if number.isdecimal() else inf


def _line(jobs: Iterable[QueuedJobInfo], names: Mapping[str, str]) -> QueueAhead:
    jobs = list(jobs)
    named = tuple(names[job.scheduler_id] for job in jobs if job.scheduler_id in names)
    return QueueAhead(
        jobs=sum(job.tasks for job in jobs), gpus=sum(job.gpus * job.tasks for job in jobs), named=named[:5]
    )


class _Board:
    """The cluster as one request and its variants see it; looked at once for each partition, type and constraint."""

    def __init__(self, request: Request, cluster: Cluster, line: list[QueuedJobInfo]) -> None:
        self.cluster, self.usage = cluster, Usage(cluster)
        self.seats = survey(request, cluster)
        names = {node.name for node in (seat.node for seat in self.seats)}
        self.line = [job for job in line if self._shares(job, request, names)]
        self._after: Ahead = after(list(_tasks(line)), cluster)
        self._seats: dict[tuple[object, ...], tuple[list[Seat], list[Seat]]] = {}

    def attempt(self, request: Request) -> Outcome:
        """Whether this would start now, and if not, whether only those ahead are in its way."""
        if any(check.is_over for check in self.checks(request)) or stuck.closed_partition(request, self.cluster):
            return Outcome("")
        if next(stuck.of_reservation(request, self.cluster), None) is not None:
            return Outcome("")
        if next(stuck.of_licenses(request, self.cluster), None) is not None:
            return Outcome("")
        if names := self.nodes(request):
            return Outcome("now", _where(names))
        if self.fits_but_for_others(request):
            return Outcome("free", f"There is room, but {_jobs(len(self.line))} ahead of it may take it.")
        return Outcome("")

    def nodes(self, request: Request) -> tuple[str, ...]:
        """The nodes where it would start now, once those ahead have; of more than it needs, all. Empty: nowhere."""
        if licenses.are_taken(request, self.cluster, self.line):
            return ()
        if not starts(request, self.open(request, held=True), self.cluster):
            return ()
        return look(request, self.open(request, held=True), self.cluster).nodes

    def fits_but_for_others(self, request: Request) -> bool:
        return starts(request, self.open(request, held=False), self.cluster)

    def checks(self, request: Request) -> list[limits.Check]:
        return limits.checks(request, self.cluster, self.usage)

    def open(self, request: Request, *, held: bool) -> list[Seat]:
        """Seats with anything free; `held`: after those ahead have taken theirs."""
        key = (
            request.partition, request.gpu_type, bool(request.gpus), request.constraint, request.exclusive,
            request.max_nodes <= len(request.required_nodes),
        )  # fmt: skip
        if key not in self._seats:
            free = [seat for seat in survey(request, self.cluster) if not seat.why and seat.room.cpus]
            left = [seat for seat in survey(request, self.cluster, left=self._after.left) if not seat.why]
            self._seats[key] = (free, held_back((seat for seat in left if seat.room.cpus), self._after))
        return self._seats[key][held]

    def ends(self) -> list[float]:
        """Moments before which it would have to be over: reservations, planned starts, limits of time."""
        now = self.cluster.now
        found = {seat.until for seats in self._seats.values() for seat in seats[1]}
        found |= {seat.until for seat in self.seats}
        partitions = (p.max_time_s for p in self.cluster.partitions if p.max_time_s)
        found |= {now + most + 120 for most in partitions}
        return [end for end in found if now < end < inf]

    def _shares(self, job: QueuedJobInfo, request: Request, names: set[str]) -> bool:
        """Whether that job waits for nodes that this one could use."""
        if set(job.partition.split(",")) & set(request.partition.split(",")):
            return True
        listed = (p for p in self.cluster.partitions if p.name in job.partition.split(","))
        return self.cluster.is_one_machine or any(not names.isdisjoint(p.nodes) for p in listed)


def _tasks(line: Iterable[QueuedJobInfo]) -> Iterator[QueuedJobInfo]:
    """Each waiting task of an array for itself."""
    for job in line:
        for _ in range(max(1, min(job.tasks, 100))):
            yield job


def _where(names: tuple[str, ...]) -> str:
    if len(names) <= 3:
        return f"There is room on {formatting.listed(list(names))}."
    return f"{formatting.plural(len(names), 'node')} have room for it."


def _jobs(number: int) -> str:
    return formatting.plural(number, "job")
