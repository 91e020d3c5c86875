"""Who holds which GPU, and since when, as three tell it: the job's launcher, the scheduler's indices, processes.

The launcher knows best: it asks NVML for what it was given. The scheduler counts GPUs by their device files, which is
NVML's order mostly, not always. Processes are seen only while there are some, so they alone tell of jobs whose
scheduler says no indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction
from django.utils import timezone

from nodes.models import Agent, Gpu, Holding, QueuedJob
from nodes.schedulers.cluster import HOLDING

Source = Holding.Source
_BETTER = (Source.PROCESSES, Source.SCHEDULER, Source.LAUNCHER)


@dataclass(frozen=True)
class Claim:
    """A job that is said to hold a GPU."""

    gpu_id: int
    agent_id: int
    scheduler_id: str
    user: str
    name: str
    source: str
    since: datetime

    @property
    def key(self) -> tuple[int, str]:
        return self.gpu_id, self.scheduler_id


def update(now: datetime | None = None) -> int:
    """Bring the open holdings in step with the queue and the processes; answers how many began or ended.

    What a launcher has told stands for as long as its job holds its nodes.
    """
    now = now or timezone.now()
    agents = {agent.node: agent for agent in Agent.objects.filter(is_made_up=False, gpus__gone_at=None).distinct()}
    open_ones = list(Holding.objects.filter(until=None, is_made_up=False))
    if not agents and not open_ones:
        return 0
    running = {job.scheduler_id: job for job in QueuedJob.objects.filter(state__in=HOLDING, is_made_up=False)}
    claims = _best([*_by_scheduler(running.values(), agents, now), *_by_processes(running, agents, now)])
    told = {(one.agent_id, one.scheduler_id) for one in open_ones if one.source == Source.LAUNCHER}
    claims = {key: claim for key, claim in claims.items() if (claim.agent_id, claim.scheduler_id) not in told}
    return _write(open_ones, claims, set(running), now)


def told_by_launcher(job: QueuedJob, uuids: Sequence[str], at: datetime) -> None:
    """A job's launcher has named the GPUs that it holds on its node.

    A launcher is the job's own program, so it is believed only of GPUs on the job's nodes, of no more than the
    scheduler gave it there, and not of one on which the machine sees another job's process.
    """
    named: dict[int, list[Gpu]] = {}
    for gpu in Gpu.objects.filter(uuid__in=uuids[:64], gone_at=None, agent__node__in=job.nodes).select_related("agent"):
        named.setdefault(gpu.agent_id, []).append(gpu)
    for gpus in named.values():
        agent = gpus[0].agent
        given = job.gpu_indices.get(agent.node) or range(-(-job.gpus // max(1, len(job.nodes))))
        taken = {one["gpu"] for one in agent.processes if one["job"] not in {"", job.scheduler_id}}
        if len(gpus) <= len(given) and taken.isdisjoint(gpu.uuid for gpu in gpus):
            _hold_as_told(agent, job, gpus, at)


def _hold_as_told(agent: Agent, job: QueuedJob, gpus: Sequence[Gpu], at: datetime) -> None:
    mine = Holding.objects.filter(agent=agent, scheduler_id=job.scheduler_id, until=None)
    there = dict(mine.values_list("gpu_id", "source"))
    if there == {gpu.pk: Source.LAUNCHER for gpu in gpus}:
        return
    with transaction.atomic():
        mine.exclude(gpu__in=gpus).delete()  # the scheduler counts otherwise
        mine.update(source=Source.LAUNCHER)
        Holding.objects.bulk_create(
            Holding(
                gpu=gpu, agent=agent, scheduler_id=job.scheduler_id, user=job.user, name=job.name[:255],
                source=Source.LAUNCHER, since=job.started_at or at,
            )
            for gpu in gpus
            if gpu.pk not in there
        )  # fmt: skip


def _by_scheduler(running: Iterable[QueuedJob], agents: dict[str, Agent], now: datetime) -> Iterator[Claim]:
    """What the scheduler's indices say: N of /dev/nvidiaN, where the agent tells that, else NVML's index."""
    gpus: dict[int, list[Gpu]] = {}
    for gpu in Gpu.objects.filter(agent__in=agents.values(), gone_at=None):
        gpus.setdefault(gpu.agent_id, []).append(gpu)
    for job in running:
        for node, indices in job.gpu_indices.items():
            agent = agents.get(node)
            for gpu in gpus.get(agent.pk, ()) if agent else ():
                if (gpu.index if gpu.minor is None else gpu.minor) in indices:
                    since = job.started_at or now
                    yield Claim(gpu.pk, gpu.agent_id, job.scheduler_id, job.user, job.name, Source.SCHEDULER, since)


def _by_processes(running: dict[str, QueuedJob], agents: dict[str, Agent], now: datetime) -> Iterator[Claim]:
    ids = {(gpu.agent_id, gpu.uuid): gpu.pk for gpu in Gpu.objects.filter(agent__in=agents.values(), gone_at=None)}
    for agent in agents.values():
        if agent.is_silent(now):
            continue
        for process in agent.processes:
            gpu_id, job_id = ids.get((agent.pk, process["gpu"])), process["job"]
            job = running.get(job_id)
            if gpu_id is None or not job_id or (job is not None and job.gpu_indices.get(agent.node)):
                continue
            user, name = (job.user, job.name) if job else (process["user"], "")
            since = (job.started_at if job else None) or now
            yield Claim(gpu_id, agent.pk, job_id, user, name, Source.PROCESSES, since)


def _best(claims: Iterable[Claim]) -> dict[tuple[int, str], Claim]:
    found: dict[tuple[int, str], Claim] = {}
    for claim in sorted(claims, key=lambda one: _BETTER.index(one.source)):
        found[claim.key] = claim
    return found


def _write(open_ones: Sequence[Holding], claims: dict[tuple[int, str], Claim], running: set[str], now: datetime) -> int:
    held = {(one.gpu_id, one.scheduler_id) for one in open_ones}
    over = [one.pk for one in open_ones if _is_over(one, claims, running)]
    new = [
        Holding(
            gpu_id=claim.gpu_id, agent_id=claim.agent_id, scheduler_id=claim.scheduler_id, user=claim.user,
            name=claim.name[:255], source=claim.source, since=claim.since,
        )
        for key, claim in claims.items()
        if key not in held
    ]  # fmt: skip
    if over or new:
        with transaction.atomic():
            Holding.objects.filter(pk__in=over, until=None).update(until=now)
            Holding.objects.bulk_create(new, ignore_conflicts=True)
    return len(over) + len(new)


def _is_over(one: Holding, claims: dict[tuple[int, str], Claim], running: set[str]) -> bool:
    """Whether a job holds this GPU no more."""
    if (one.gpu_id, one.scheduler_id) in claims:
        return False
    # Between two steps a job has no process, and holds what it holds.
    return one.source == Source.SCHEDULER or one.scheduler_id not in running
