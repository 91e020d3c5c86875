"""Notify people whose jobs have idle GPUs, and sysadmins of processes on unallocated GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q
from django.urls import reverse
from django.utils import timezone

from jobs import incarnations
from jobs.models import Attempt
from nodes.models import Gpu, Holding, QueuedJob
from nodes.models.telemetry import SILENT
from nodes.telemetry import use
from nodes.telemetry.use import IdleGpu
from portal import notify
from portal.models import Notice, User
from portal.notify import SYSADMINS
from vigil_core import formatting
from vigil_core.untrusted import line

IDLE, UNALLOCATED = "gpu.idle", "gpu.unheld"
UNKNOWN_OWNERS = f"{IDLE}:strangers"  # stored with notices, so its text stays
PERSISTED_FOR = timedelta(seconds=50)
"""How long a process must be on a GPU before it counts as unowned: the queue is read some seconds after a job
has started."""

_first_observed: dict[tuple[str, object], datetime] = {}  # by this process; after a restart it waits a minute longer


def forget() -> None:
    """Forget what this process has observed, as if it had just started."""
    _first_observed.clear()


@dataclass(frozen=True)
class IdleJob:
    """A job of the scheduler with GPUs that have been idle for too long."""

    scheduler_id: str
    idle: Sequence[IdleGpu]
    gpu_count: int  # all GPUs allocated to it
    key: str
    name: str
    owner: User | None
    attempt: Attempt | None

    @property
    def since(self) -> datetime:
        return min(gpu.since for gpu in self.idle)

    @property
    def person(self) -> str:
        """Return the owner's name, else the scheduler's user."""
        return self.owner.username if self.owner else self.idle[0].holding.user

    @property
    def nodes(self) -> list[str]:
        return sorted({gpu.holding.agent.node for gpu in self.idle})

    @property
    def link(self) -> str:
        """Return the address of the job's page, or of its node's page if it is not Vigil's job."""
        if self.attempt is not None:
            return reverse("job", args=[self.attempt.job_id])
        return reverse("node", args=[self.idle[0].holding.agent.node])


def raise_notices(now: datetime | None = None) -> None:
    """Raise notices that apply and withdraw those that no longer do. Idempotent, also across processes."""
    now = now or timezone.now()
    _notify_idle(idle_jobs(now), now)
    _notify_unallocated(now)


def idle_jobs(now: datetime | None = None) -> list[IdleJob]:
    """Return the jobs with idle GPUs, longest idle first."""
    by_job: dict[str, list[IdleGpu]] = defaultdict(list)
    for gpu in use.idle_now(now):
        by_job[gpu.holding.scheduler_id].append(gpu)
    if not by_job:
        return []
    holdings = list(Holding.objects.filter(until=None, scheduler_id__in=by_job))
    allocated = _AllocatedJobs(holdings)
    wasted = {scheduler_id: allocated.without_spares(scheduler_id, gpus) for scheduler_id, gpus in by_job.items()}
    return [allocated.job(scheduler_id, gpus) for scheduler_id, gpus in wasted.items() if gpus]


class _AllocatedJobs:
    """The jobs behind some open allocations."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self.by_job: dict[str, list[Holding]] = defaultdict(list)
        for holding in holdings:
            self.by_job[holding.scheduler_id].append(holding)
        alive = Attempt.objects.alive().confirmed().filter(scheduler_id__in=self.by_job)
        rows = alive.with_job().select_related("job__owner").order_by("pk")
        self.attempts = {attempt.scheduler_id: attempt for attempt in rows}
        users = {holding.user for holding in holdings if holding.user}
        self.people = {user.slurm_user: user for user in User.objects.filter(slurm_user__in=users, is_active=True)}
        queued = QueuedJob.objects.filter(scheduler_id__in=self.by_job)
        self.started = dict(queued.exclude(started_at=None).values_list("scheduler_id", "started_at"))

    def key(self, scheduler_id: str) -> str:
        """Return a key that stays the same while the job runs, although the scheduler may use its id again later."""
        if (attempt := self.attempts.get(scheduler_id)) is not None:
            return f"{IDLE}:attempt:{attempt.pk}"
        began = self.started.get(scheduler_id) or min(holding.since for holding in self.by_job[scheduler_id])
        return f"{IDLE}:{line(scheduler_id, 64)}:{int(began.timestamp())}"

    def without_spares(self, scheduler_id: str, idle: Sequence[IdleGpu]) -> Sequence[IdleGpu]:
        """Return the idle GPUs without those on requested spare nodes (resources.spares)."""
        attempt = self.attempts.get(scheduler_id)
        spares = (attempt.job.spec.get("resources") or {}).get("spares") if attempt else 0
        if attempt is None or not spares:
            return idle
        spare_nodes = incarnations.idle_spares(attempt, spares)
        return [gpu for gpu in idle if gpu.holding.agent.node not in spare_nodes]

    def job(self, scheduler_id: str, idle: Sequence[IdleGpu]) -> IdleJob:
        holdings, attempt = self.by_job[scheduler_id], self.attempts.get(scheduler_id)
        owner = attempt.job.owner if attempt else self.people.get(idle[0].holding.user)
        name = (
            attempt.job.name
            if attempt
            else next((holding.name for holding in holdings if holding.name), "") or scheduler_id
        )
        return IdleJob(scheduler_id, idle, max(len(holdings), len(idle)), self.key(scheduler_id), name, owner, attempt)


def _notify_idle(jobs: Sequence[IdleJob], now: datetime) -> None:
    notified = [job for job in jobs if job.owner is not None and job.owner.is_active]
    for job in notified:
        assert job.owner is not None
        title, detail = notice_text(job, now)
        notify.raise_notice(job.key, kind=IDLE, to=job.owner, title=title, detail=detail, link=job.link)
    ownerless = [job for job in jobs if job.owner is None]
    if ownerless:
        gpus = sum(len(job.idle) for job in ownerless)
        are = f"{formatting.plural(gpus, 'GPU')} {'is' if gpus == 1 else 'are'}"
        title = f"{are} idle but allocated to people without an account here."
        notify.raise_notice(UNKNOWN_OWNERS, kind=IDLE, to=SYSADMINS, title=title, link=f"{reverse('waste')}?by=person")
    if _has_active(IDLE):
        keys = {job.key for job in notified} | _keys_on_silent_nodes(now) | ({UNKNOWN_OWNERS} if ownerless else set())
        notify.withdraw_missing(IDLE, keys)


def _keys_on_silent_nodes(now: datetime) -> set[str]:
    """Return keys of jobs on silent nodes, whose notices stay since nothing new is known of them."""
    is_silent = Q(agent__heard_at=None) | Q(agent__heard_at__lt=now - SILENT)
    silent = Holding.objects.filter(is_silent, until=None, is_made_up=False)
    ids = set(silent.order_by().values_list("scheduler_id", flat=True))
    if not ids:
        return set()
    allocated = _AllocatedJobs(list(Holding.objects.filter(until=None, scheduler_id__in=ids)))
    return {allocated.key(scheduler_id) for scheduler_id in ids}


def notice_text(job: IdleJob, now: datetime) -> tuple[str, str]:
    """Return the notice's sentence, and the requested action."""
    idle_count, idle_for = len(job.idle), formatting.rough_words((now - job.since).total_seconds())
    if idle_count == 1:
        gpu_text = "1 GPU" if job.gpu_count == 1 else f"1 of its {job.gpu_count} GPUs"
        title = f"{job.name} has left {gpu_text} idle for {idle_for}."
        request = "Release it, or explain why it is needed."
    else:
        gpu_text = f"{idle_count} GPUs" if job.gpu_count == idle_count else f"{idle_count} of its {job.gpu_count} GPUs"
        title = f"{job.name} has left {gpu_text} idle, the longest for {idle_for}."
        request = "Release them, or explain why they are needed."
    return title, f"{request} {_location(job)}"


def _location(job: IdleJob) -> str:
    """Return on which nodes the GPUs are, and whether any process uses them."""
    nodes = job.nodes
    where = formatting.listed(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
    if any(gpu.has_process for gpu in job.idle):
        return f"On {where}."
    return f"On {where}; no process uses {'it' if len(job.idle) == 1 else 'them'}."


def _notify_unallocated(now: datetime) -> None:
    by_node: dict[str, list[tuple[Gpu, dict[str, object]]]] = defaultdict(list)
    for gpu, process in _persistent(use.processes_on_free_gpus(now), now):
        by_node[gpu.agent.node].append((gpu, process))
    keys = {node: f"{UNALLOCATED}:{node}"[: notify.MAX_KEY] for node in by_node}
    for node, processes in by_node.items():
        title, detail = _unallocated_text(node, processes)
        link = reverse("node", args=[node])
        notify.raise_notice(keys[node], kind=UNALLOCATED, to=SYSADMINS, title=title, detail=detail, link=link)
    if _has_active(UNALLOCATED):
        notify.withdraw_missing(UNALLOCATED, keys.values())


def _persistent(found: Iterable[tuple[Gpu, dict[str, object]]], now: datetime) -> list[tuple[Gpu, dict[str, object]]]:
    """Return those that an earlier check has found, long enough ago."""
    there = {(gpu.uuid, process["pid"]): (gpu, process) for gpu, process in found}
    for gone in set(_first_observed) - set(there):
        del _first_observed[gone]
    return [entry for key, entry in there.items() if now - _first_observed.setdefault(key, now) >= PERSISTED_FOR]


def _unallocated_text(node: str, found: Sequence[tuple[Gpu, dict[str, object]]]) -> tuple[str, str]:
    gpus = sorted({gpu.index for gpu, _ in found})
    gpu_text = f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {formatting.listed([str(index) for index in gpus[:8]])}"
    by_process: dict[tuple[object, str, str], int] = defaultdict(
        int
    )  # a process with a context on several GPUs counts once
    for _, process in found:
        by_process[process["pid"], line(process["name"], 40), line(process["user"], 32)] += 1
    process_text = "A process is" if len(by_process) == 1 else f"{len(by_process)} processes are"
    named = [_process_words(*process, on) for process, on in by_process.items()]
    more = f"; {len(named) - 5} more" if len(named) > 5 else ""
    return (
        f"{process_text} on {gpu_text} of {node}, which is not allocated to any job.",
        f"{'; '.join(named[:5])}{more}.",
    )


def _process_words(pid: object, name: str, user: str, gpus: int) -> str:
    """Return "python3 (PID 17) of ann", "PID 4242, user unknown, on 8 GPUs"."""
    what = f"{name} (PID {pid})" if name else f"PID {pid}"
    owner = f" of {user}" if user else ", user unknown"
    return f"{what}{owner}, on {gpus} GPUs" if gpus > 1 else f"{what}{owner}"


def _has_active(kind: str) -> bool:
    return Notice.objects.active().filter(kind=kind).exists()
