"""Keep the intervals in which jobs have GPUs in step with what is claimed (`nodes.telemetry.claims`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import NamedTuple

from django.db import transaction
from django.utils import timezone

from nodes.models import Holding
from nodes.telemetry.claims import ClusterSnapshot, GpuClaim, GpuJob, LauncherGpus, LauncherReport, Running, Source

_BY_RELIABILITY = (Source.PROCESSES, Source.SCHEDULER, Source.LAUNCHER)
TOLERANCE = timedelta(seconds=2)  # between two clocks, one of which reports whole seconds


class OpenAllocation(NamedTuple):
    """An allocation that has not ended, as far as we know."""

    pk: int
    gpu_id: int
    agent_id: int
    scheduler_id: str
    name: str
    source: str
    since: datetime

    @property
    def key(self) -> GpuJob:
        return self.gpu_id, self.scheduler_id


def update(reports: Iterable[LauncherReport] = (), now: datetime | None = None) -> int:
    """Bring open allocations in step with queue, processes and launchers; return how many began, ended or changed.

    A launcher's report stands for as long as its job has its nodes; of several `reports` the last counts.
    """
    now = now or timezone.now()
    rows = Holding.objects.filter(until=None, is_made_up=False).order_by()
    allocations = [OpenAllocation(*row) for row in rows.values_list(*OpenAllocation._fields)]
    snapshot = ClusterSnapshot.read(now)
    if not allocations and not any(machine.gpus for machine in snapshot.machines.values()):
        return 0
    continuing = [
        allocation
        for allocation in allocations
        if not _is_of_earlier_run(allocation, snapshot.running.get(allocation.scheduler_id))
    ]
    return _AllocationChanges(snapshot, _claims(snapshot, reports, continuing)).write(allocations)


def _claims(
    snapshot: ClusterSnapshot, reports: Iterable[LauncherReport], allocations: Iterable[OpenAllocation]
) -> dict[GpuJob, GpuClaim]:
    """Return the claims of the most reliable source per job and machine."""
    by_launcher = snapshot.by_launchers(reports, _known_from_launchers(snapshot, allocations))
    claims = snapshot.by_processes | snapshot.by_scheduler
    claims = {key: claim for key, claim in claims.items() if (claim.agent_id, claim.scheduler_id) not in by_launcher}
    for (_, scheduler_id), gpus in by_launcher.items():
        job = snapshot.running[scheduler_id]
        claims |= {(gpu.pk, scheduler_id): snapshot.claim(gpu, job, Source.LAUNCHER) for gpu in gpus}
    return claims


def _known_from_launchers(snapshot: ClusterSnapshot, allocations: Iterable[OpenAllocation]) -> LauncherGpus:
    """Return what launchers reported before, unless a process refutes it."""
    present = {gpu.pk: (machine, gpu) for machine in snapshot.machines.values() for gpu in machine.gpus}
    found: LauncherGpus = defaultdict(list)
    refuted = set()
    for allocation in allocations:
        job = snapshot.running.get(allocation.scheduler_id)
        if allocation.source == Source.LAUNCHER and job is not None and allocation.gpu_id in present:
            machine, gpu = present[allocation.gpu_id]
            found[machine.pk, allocation.scheduler_id].append(gpu)
            if snapshot.is_refuted(job, machine, gpu):
                refuted.add((machine.pk, allocation.scheduler_id))
    return {key: gpus for key, gpus in found.items() if key not in refuted}


def _is_of_earlier_run(allocation: OpenAllocation, job: Running | None) -> bool:
    """Return whether the job has been requeued since, and runs again with the same id."""
    return job is not None and job.started_at is not None and allocation.since < job.started_at - TOLERANCE


@dataclass
class _AllocationChanges:
    """The changes to write."""

    snapshot: ClusterSnapshot
    claims: Mapping[GpuJob, GpuClaim]
    ended: list[tuple[OpenAllocation, datetime]] = field(default_factory=list)
    mistaken: list[int] = field(default_factory=list)
    upgraded: dict[tuple[str, str, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    confirmed: set[GpuJob] = field(default_factory=set)

    def write(self, allocations: Iterable[OpenAllocation]) -> int:
        """Apply the changes; return how many rows changed."""
        for allocation in allocations:
            self._classify(allocation)
        new = [claim for key, claim in self.claims.items() if key not in self.confirmed]
        if not (new or self.ended or self.mistaken or self.upgraded):
            return 0
        begun = _new_rows(new)
        with transaction.atomic():
            Holding.objects.filter(pk__in=self.mistaken, until=None).delete()
            for until, pks in self._end_times(new).items():
                Holding.objects.filter(pk__in=pks, until=None).update(until=until)
            for (source, user, name), pks in self.upgraded.items():
                names = {"user": user, "name": name[:255]} if name else {}
                Holding.objects.filter(pk__in=pks, until=None).update(source=source, **names)
            Holding.objects.bulk_create(begun, batch_size=500, ignore_conflicts=True)
        return len(new) + len(self.ended) + len(self.mistaken) + sum(map(len, self.upgraded.values()))

    def _classify(self, allocation: OpenAllocation) -> None:
        """Decide whether the allocation continues, and by which source."""
        job, claim = self.snapshot.running.get(allocation.scheduler_id), self.claims.get(allocation.key)
        if job is not None and job.started_at is not None and _is_of_earlier_run(allocation, job):
            self.ended.append((allocation, job.started_at))
        elif claim is not None:
            self.confirmed.add(allocation.key)
            self._upgrade_source(allocation, claim)
        elif (
            allocation.source == Source.SCHEDULER
            and self._sources.get((allocation.agent_id, allocation.scheduler_id)) == Source.LAUNCHER
        ):
            self.mistaken.append(allocation.pk)  # the scheduler's index was not this GPU
        elif allocation.source == Source.PROCESSES and job is not None and not self._has_better_source(allocation):
            self.confirmed.add(allocation.key)  # between two steps a job has no process, but keeps its GPUs
        else:
            self.ended.append((allocation, self.snapshot.now))

    def _upgrade_source(self, allocation: OpenAllocation, claim: GpuClaim) -> None:
        if not allocation.name and claim.name:
            self.upgraded[claim.source, claim.user, claim.name].append(allocation.pk)
        elif _BY_RELIABILITY.index(claim.source) > _BY_RELIABILITY.index(allocation.source):
            self.upgraded[claim.source, "", ""].append(allocation.pk)

    @cached_property
    def _sources(self) -> dict[tuple[int, str], str]:
        """Return the source of each job's claims on each machine."""
        return {(claim.agent_id, claim.scheduler_id): claim.source for claim in self.claims.values()}

    def _has_better_source(self, allocation: OpenAllocation) -> bool:
        return self._sources.get((allocation.agent_id, allocation.scheduler_id), allocation.source) != Source.PROCESSES

    def _end_times(self, new: Iterable[GpuClaim]) -> dict[datetime, list[int]]:
        """Return the allocations by end time. The queue is polled, but another job's start marks the end exactly."""
        begins: dict[int, datetime] = {}
        for claim in new:
            if claim.source != Source.PROCESSES:
                begins[claim.gpu_id] = min(claim.since, begins.get(claim.gpu_id, claim.since))
        found = defaultdict(list)
        for allocation, until in self.ended:
            begin = begins.get(allocation.gpu_id, until)
            found[max(allocation.since, min(until, begin) if begin > allocation.since else until)].append(allocation.pk)
        return found


def _new_rows(new: Iterable[GpuClaim]) -> list[Holding]:
    """Return rows for new claims; one that resumes after a gap begins where its previous interval ended."""
    since = min((claim.since for claim in new), default=timezone.now())
    ended = Holding.objects.filter(until__gt=since, scheduler_id__in={claim.scheduler_id for claim in new}).order_by()
    latest: dict[GpuJob, datetime] = {}
    for gpu_id, scheduler_id, until in ended.values_list("gpu_id", "scheduler_id", "until"):
        if until is not None:
            latest[gpu_id, scheduler_id] = max(until, latest.get((gpu_id, scheduler_id), until))
    return [
        Holding(
            gpu_id=claim.gpu_id, agent_id=claim.agent_id, scheduler_id=claim.scheduler_id, user=claim.user[:255],
            name=claim.name[:255], source=claim.source,
            since=max(claim.since, latest.get((claim.gpu_id, claim.scheduler_id), claim.since)),
        )
        for claim in new
    ]  # fmt: skip
