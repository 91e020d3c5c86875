"""Explain why a job waits: what blocks it, who is ahead, when it should start, and what would start now. Pure.

    why = explain(WaitingJob(spec=…, request=…, reason="Resources", scheduler_id="77"), cluster)

The scheduler's reason comes first; what Vigil counts itself follows, by the scheduler's last snapshot of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from jobs.spec import JobSpec
from jobs.waiting import blocks, limits, maintenance
from jobs.waiting.block import Block, MaintenanceEffect, QueueAhead, WaitFacts, reason_word
from jobs.waiting.limits import Usage
from jobs.waiting.reasons import explained
from jobs.waiting.variants import TrialOutcome, Variant, propose
from nodes.schedulers.cluster import QueuedJobInfo
from nodes.scheduling import licenses
from nodes.scheduling.backfill import JobsAhead, after, limited_by_plans
from nodes.scheduling.capacity import CandidateNode, ClusterCapacity, Request, assess, starts, survey
from nodes.scheduling.maintenance import PlannedMaintenance
from vigil_core import formatting

# Slurm's reasons of a job that waits for its turn; any other keeps a job from starting whatever is free.
QUEUED_REASONS = frozenset({"", "None", "Resources", "Priority"})
SAME_TIME_S = 60  # Slurm rounds a begin to its own clock's seconds


@dataclass(frozen=True, kw_only=True)
class WaitingJob:
    """A job that waits. `names`: the jobs of others that the reader may see, "#12 wren" by scheduler id."""

    spec: JobSpec | None  # None: Vigil did not submit it, so there are no variants to offer
    request: Request
    reason: str = ""  # the scheduler's word, or Vigil's own sentence
    scheduler_id: str = ""  # "": not handed over yet, or only a draft
    job_id: int | None = None  # Vigil's; None: only a draft
    you: str = ""  # the reader's own user name at the scheduler
    names: Mapping[str, str] = field(default_factory=dict)
    waits_in_vigil: bool = False  # not submitted to the scheduler yet; `reason` explains why
    maintenance: Sequence[PlannedMaintenance] = ()


@dataclass(frozen=True, kw_only=True)
class WaitExplanation:
    """Why a job waits. `reason`: the scheduler's own; `meaning`: in plain words. Times are Unix seconds."""

    state: Literal["pending"] = "pending"
    reason: str
    meaning: str
    starts_at: float | None
    blocks: tuple[Block, ...]
    ahead: QueueAhead
    never: bool  # as it is, it cannot start, however long it waits
    starts_on: tuple[str, ...]  # nodes with room for it, if nothing is in its way
    variants: tuple[Variant, ...]
    maintenance: tuple[MaintenanceEffect, ...] = ()  # windows that keep it waiting, or that it would run into

    @property
    def coming_maintenance(self) -> list[MaintenanceEffect]:
        """Return the windows that do not keep it waiting now, but will if it has not started by then."""
        return [effect for effect in self.maintenance if not effect.is_blocking]

    @property
    def sentence(self) -> str:
        """Return the text of the first block, or what the scheduler's reason means."""
        return self.blocks[0].text if self.blocks else self.meaning


def explain(waiting: WaitingJob, cluster: ClusterCapacity) -> WaitExplanation:
    """Return everything that is known of why it waits."""
    ids = (waiting.scheduler_id, waiting.scheduler_id.partition("_")[0])  # those of an array wait together
    queued = next((job for id in ids for job in cluster.queue if id and job.scheduler_id == id), None)
    request = with_scheduler_defaults(waiting.request, queued)
    reason = waiting.reason or (queued.reason if queued else "")
    view = _ClusterView(request, cluster, ahead_of(queued, request, cluster))
    ahead = _queue_ahead(view.line, waiting.names)
    windows = maintenance.effects(request, view.candidates, waiting.maintenance, cluster.now)
    blocks_found = blocks.blocks_of(
        WaitFacts(
            request=request,
            cluster=cluster,
            reason=reason,
            fit=assess(request, view.candidates, cluster),
            candidates=view.candidates,
            checks=view.checks(request),
            ahead=ahead,
            maintenance=windows,
            free_until=min((candidate.until for candidate in view.open(request, behind_queue=True)), default=inf),
            queued=queued,
            names=waiting.names,
            you=waiting.you,
            waits_in_vigil=waiting.waits_in_vigil,
            scheduler_id=waiting.scheduler_id,
            job_id=waiting.job_id,
        )
    )
    variants: tuple[Variant, ...] = ()
    if waiting.spec is not None and blocks.may_change(blocks_found):
        variants = propose(waiting.spec, request, cluster, view.try_request, view.ends())
    return WaitExplanation(
        reason=reason,
        meaning=explained(reason, waiting.scheduler_id, waiting.job_id),
        starts_at=queued.starts_at if queued and queued.starts_at and queued.starts_at > cluster.now else None,
        blocks=tuple(blocks_found),
        ahead=ahead,
        never=any(block.is_final for block in blocks_found),
        starts_on=view.nodes(request) if not blocks_found else (),
        variants=variants,
        maintenance=tuple(windows),
    )


def with_scheduler_defaults(request: Request, queued: QueuedJobInfo | None) -> Request:
    """Return the request with the defaults that the scheduler has filled in."""
    if queued is None:
        return request
    return replace(
        request,
        user=queued.user or request.user,
        account=queued.account or request.account,
        qos=queued.qos or request.qos,
        partition=queued.partition or request.partition,
        licenses=queued.licenses or request.licenses,
        begin_at=_begin_at(request, queued),
    )


def _begin_at(request: Request, queued: QueuedJobInfo) -> float | None:
    """Return when it may begin by the scheduler's current word: `scontrol update starttime=…` may have changed it.

    Slurm reports the start of a job that is to begin later as its begin, whatever else holds it back.
    """
    if reason_word(queued.reason) == blocks.BEGIN:
        return queued.starts_at or request.begin_at
    if request.begin_at and queued.starts_at and queued.starts_at >= request.begin_at - SAME_TIME_S:
        return queued.starts_at
    return None


def ahead_of(queued: QueuedJobInfo | None, request: Request, cluster: ClusterCapacity) -> list[QueuedJobInfo]:
    """Return the jobs that get free resources before it, in order; every waiting job if it is not in the queue."""
    turn = _turn(queued) if queued else (inf, inf, inf)
    waiting = (job for job in cluster.queue if job.state == "pending" and job is not queued)
    found = [job for job in waiting if _is_in_turn(job, cluster) and _turn(job) < turn]
    return sorted(found, key=_turn)


def _is_in_turn(job: QueuedJobInfo, cluster: ClusterCapacity) -> bool:
    """Return whether it waits for resources only.

    A single machine starts jobs in order, except those that begin later.
    """
    word = reason_word(job.reason)
    return word != blocks.BEGIN if cluster.simulates_nodes else word in QUEUED_REASONS


def _turn(job: QueuedJobInfo) -> tuple[float, float, float]:
    number = job.scheduler_id.partition("_")[0]
    return -job.priority, job.submitted_at or 0.0, float(number) if number.isdecimal() else inf


def _queue_ahead(jobs: Iterable[QueuedJobInfo], names: Mapping[str, str]) -> QueueAhead:
    jobs = list(jobs)
    named = tuple(names[job.scheduler_id] for job in jobs if job.scheduler_id in names)
    return QueueAhead(
        jobs=sum(job.tasks for job in jobs), gpus=sum(job.gpus * job.tasks for job in jobs), named=named[:5]
    )


class _ClusterView:
    """The cluster as one request and its variants see it, surveyed once for each partition, GPU type and constraint."""

    def __init__(self, request: Request, cluster: ClusterCapacity, line: list[QueuedJobInfo]) -> None:
        self.cluster, self.usage = cluster, Usage(cluster)
        self.candidates = survey(request, cluster)
        names = {node.name for node in (candidate.node for candidate in self.candidates)}
        self.line = [job for job in line if self._shares(job, request, names)]
        self._after: JobsAhead = after(list(_tasks(line)), cluster)
        self._candidates: dict[tuple[object, ...], tuple[list[CandidateNode], list[CandidateNode]]] = {}

    def try_request(self, request: Request) -> TrialOutcome:
        """Return whether this request would start now, and if not, whether only jobs ahead are in its way."""
        if any(check.is_over for check in self.checks(request)) or blocks.is_partition_closed(request, self.cluster):
            return TrialOutcome("")
        if next(blocks.reservation_blocks(request, self.cluster), None) is not None:
            return TrialOutcome("")
        if next(blocks.license_blocks(request, self.cluster), None) is not None:
            return TrialOutcome("")
        if names := self.nodes(request):
            return TrialOutcome("now", _where(names))
        if self.fits_but_for_others(request):
            return TrialOutcome("free", f"There is room, but {_jobs(len(self.line))} ahead of it may take it.")
        return TrialOutcome("")

    def nodes(self, request: Request) -> tuple[str, ...]:
        """Return all nodes where it could start now, after the jobs ahead of it; empty if it could not."""
        if licenses.are_taken(request, self.cluster, self.line):
            return ()
        if not starts(request, self.open(request, behind_queue=True), self.cluster):
            return ()
        return assess(request, self.open(request, behind_queue=True), self.cluster).nodes

    def fits_but_for_others(self, request: Request) -> bool:
        return starts(request, self.open(request, behind_queue=False), self.cluster)

    def checks(self, request: Request) -> list[limits.LimitCheck]:
        return limits.checks(request, self.cluster, self.usage)

    def open(self, request: Request, *, behind_queue: bool) -> list[CandidateNode]:
        """Return candidates with free resources; with `behind_queue`, after the jobs ahead have taken theirs."""
        key = (
            request.partition, request.gpu_type, bool(request.gpus), request.constraint, request.exclusive,
            request.max_nodes <= len(request.required_nodes),
        )  # fmt: skip
        if key not in self._candidates:
            free = [
                candidate for candidate in survey(request, self.cluster) if not candidate.why and candidate.room.cpus
            ]
            left = [
                candidate for candidate in survey(request, self.cluster, left=self._after.left) if not candidate.why
            ]
            self._candidates[key] = (
                free,
                limited_by_plans((candidate for candidate in left if candidate.room.cpus), self._after),
            )
        return self._candidates[key][behind_queue]

    def ends(self) -> list[float]:
        """Return moments before which it would have to end: reservations, planned starts, time limits."""
        now = self.cluster.now
        found = {candidate.until for candidates in self._candidates.values() for candidate in candidates[1]}
        found |= {candidate.until for candidate in self.candidates}
        partitions = (p.max_time_s for p in self.cluster.partitions if p.max_time_s)
        found |= {now + most + 120 for most in partitions}
        return [end for end in found if now < end < inf]

    def _shares(self, job: QueuedJobInfo, request: Request, names: set[str]) -> bool:
        """Return whether that job waits for nodes that this one could use."""
        if set(job.partition.split(",")) & set(request.partition.split(",")):
            return True
        listed = (p for p in self.cluster.partitions if p.name in job.partition.split(","))
        return self.cluster.simulates_nodes or any(not names.isdisjoint(p.nodes) for p in listed)


def _tasks(line: Iterable[QueuedJobInfo]) -> Iterator[QueuedJobInfo]:
    """Yield each waiting task of an array by itself."""
    for job in line:
        for _ in range(max(1, min(job.tasks, 100))):
            yield job


def _where(names: tuple[str, ...]) -> str:
    if len(names) <= 3:
        return f"There is room on {formatting.listed(list(names))}."
    return f"{formatting.plural(len(names), 'node')} have room for it."


def _jobs(number: int) -> str:
    return formatting.plural(number, "job")
