"""Collect claims about which job has which GPU: from the scheduler's indices, from processes, from launchers.

The launcher knows best: it queries NVML for its GPUs. Processes are visible only while they run, so they decide only
for jobs whose scheduler reports no indices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, Self

from django.conf import settings

from nodes.models import Agent, Gpu, Holding, Node, QueuedJob
from nodes.models.telemetry import SILENT
from nodes.schedulers import choose
from nodes.schedulers.cluster import ALLOCATED_STATES

Source = Holding.Source
GpuJob = tuple[int, str]  # of a GPU and of a job
LauncherGpus = dict[tuple[int, str], list["GpuPosition"]]  # GPUs by machine and job
MAX_REPORTED_GPUS = 64  # in one report of a launcher


class GpuClaim(NamedTuple):
    """A claim that a job has a GPU allocated."""

    gpu_id: int
    agent_id: int
    scheduler_id: str
    user: str
    name: str
    source: str
    since: datetime


class LauncherReport(NamedTuple):
    """A launcher's report: the GPUs that it was given on its node."""

    scheduler_id: str
    uuids: Sequence[str]


class GpuPosition(NamedTuple):
    """A GPU in its slot; `number` is NVML's index, `minor` is N of /dev/nvidiaN."""

    pk: int
    uuid: str
    agent_id: int
    number: int
    minor: int | None


class Running(NamedTuple):
    """A job that has its nodes, from the scheduler's queue."""

    scheduler_id: str
    user: str
    name: str
    nodes: Sequence[str]
    gpus: int
    gpu_indices: Mapping[str, Sequence[int]]
    started_at: datetime | None


@dataclass
class ReportingMachine:
    """A machine with an agent.

    `scheduler_gpus` is its number of GPUs according to the scheduler; None if the scheduler does not know the machine.
    """

    pk: int
    node: str
    processes: Sequence[Mapping[str, Any]]
    scheduler_gpus: int | None
    has_mig: bool = False
    gpus: list[GpuPosition] = field(default_factory=list)

    @cached_property
    def by_scheduler_index(self) -> dict[int, GpuPosition]:
        """Return its GPUs by the scheduler's index; empty if the indices are not of whole GPUs.

        Slurm numbers the device files in the node's gres.conf from 0, whatever their own numbers. If it lists as many
        as there are, the index is the position in that order; else the file's own number is the best guess.
        """
        if choose.capabilities_of(settings.VIGIL_SCHEDULER).numbers_whole_gpus:
            return {gpu.number: gpu for gpu in self.gpus}
        if self.scheduler_gpus == len(self.gpus):
            return dict(enumerate(sorted(self.gpus, key=_device_number)))
        return {} if self.has_mig else {_device_number(gpu): gpu for gpu in self.gpus}

    @cached_property
    def job_processes(self) -> dict[str, list[Mapping[str, Any]]]:
        """Return the processes that name a job, by GPU."""
        found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for process in self.processes:
            if process["job"]:
                found[process["gpu"]].append(process)
        return found


@dataclass
class ClusterSnapshot:
    """The reports of agents and scheduler at one moment."""

    machines: dict[str, ReportingMachine]
    running: dict[str, Running]
    now: datetime

    @classmethod
    def read(cls, now: datetime) -> Self:
        """Read everything in five queries."""
        gpus_by_node = dict(Node.objects.reported().values_list("name", "gpus"))
        agents = Agent.objects.filter(is_made_up=False, heard_at__isnull=False)
        machines = {
            pk: ReportingMachine(
                pk, node, processes if last_report_at and last_report_at >= now - SILENT else (), gpus_by_node.get(node)
            )
            for pk, node, last_report_at, processes in agents.values_list("pk", "node", "heard_at", "processes")
        }
        present = Gpu.objects.filter(gone_at=None).order_by()
        for row in present.values_list("pk", "uuid", "agent_id", "index", "minor"):
            if machine := machines.get(row[2]):
                machine.gpus.append(GpuPosition(*row))
        for pk in present.filter(has_mig=True).values_list("agent_id", flat=True):
            if machine := machines.get(pk):
                machine.has_mig = True
        queue = QueuedJob.objects.filter(state__in=ALLOCATED_STATES, is_made_up=False).order_by()
        rows = (Running(*row) for row in queue.values_list(*Running._fields))
        return cls(
            {machine.node: machine for machine in machines.values()}, {job.scheduler_id: job for job in rows}, now
        )

    def claim(self, gpu: GpuPosition, job: Running, source: str) -> GpuClaim:
        since = job.started_at or self.now
        return GpuClaim(gpu.pk, gpu.agent_id, job.scheduler_id, job.user, job.name, source, since)

    @cached_property
    def by_scheduler(self) -> dict[GpuJob, GpuClaim]:
        """Return the claims from the scheduler's indices."""
        found = {}
        for job in self.running.values():
            for node, indices in job.gpu_indices.items():
                places = machine.by_scheduler_index if (machine := self.machines.get(node)) else {}
                for gpu in filter(None, map(places.get, indices)):
                    found[gpu.pk, job.scheduler_id] = self.claim(gpu, job, Source.SCHEDULER)
        return found

    @cached_property
    def assigned(self) -> dict[int, list[str]]:
        """Return the jobs to which the scheduler's indices assign each GPU."""
        found = defaultdict(list)
        for gpu_id, scheduler_id in self.by_scheduler:
            found[gpu_id].append(scheduler_id)
        return found

    @cached_property
    def by_processes(self) -> dict[GpuJob, GpuClaim]:
        """Return the claims from processes, for jobs whose scheduler reports no indices there."""
        found = {}
        for machine in self.machines.values():
            gpus = {gpu.uuid: gpu for gpu in machine.gpus} if machine.job_processes else {}
            for uuid, processes in machine.job_processes.items():
                for process in processes if uuid in gpus else ():
                    if claim := self._by_process(machine, gpus[uuid], process):
                        found[claim.gpu_id, claim.scheduler_id] = claim
        return found

    def _by_process(self, machine: ReportingMachine, gpu: GpuPosition, process: Mapping[str, Any]) -> GpuClaim | None:
        job = self.job_of(machine, gpu, process)
        if job is None:
            if gpu.pk in self.assigned:  # an id that the queue lacks, such as an array task's
                return None
            user, name = process["user"], process["job"]
            return GpuClaim(gpu.pk, machine.pk, name, user, "", Source.PROCESSES, self.now)
        if (job.gpu_indices.get(machine.node) and machine.by_scheduler_index) or not _may_belong(job, machine, process):
            return None
        return self.claim(gpu, job, Source.PROCESSES)

    def job_of(self, machine: ReportingMachine, gpu: GpuPosition, process: Mapping[str, Any]) -> Running | None:
        """Return a process's job. An array task is "<array>_<task>" in the queue, but a plain number here."""
        number, user = process["job"], process["user"]
        if job := self.running.get(number):
            return job
        candidates = [
            task for task in self._tasks.get((machine.node, user), ()) if _may_be_task_id(number, task.scheduler_id)
        ]
        assigned_jobs = [task for task in candidates if task.scheduler_id in self.assigned.get(gpu.pk, ())]
        return next(iter(assigned_jobs), None) or (candidates[0] if len(candidates) == 1 else None)

    @cached_property
    def _tasks(self) -> dict[tuple[str, str], list[Running]]:
        """Return running array tasks, by node and user."""
        found = defaultdict(list)
        for job in self.running.values():
            if "_" in job.scheduler_id:
                for node in job.nodes:
                    found[node, job.user].append(job)
        return found

    def by_launchers(self, reports: Iterable[LauncherReport], known: LauncherGpus) -> LauncherGpus:
        """Return the GPUs by launcher report: those known before, replaced by the last credible report per machine."""
        places = {gpu.uuid: (machine, gpu) for machine in self.machines.values() for gpu in machine.gpus}
        found = {**known}
        for report in reports:
            if job := self.running.get(report.scheduler_id):
                reported: dict[str, list[GpuPosition]] = {}
                for uuid in report.uuids:
                    machine, gpu = places.get(uuid, (None, None))
                    if machine and gpu and machine.node in job.nodes:
                        reported.setdefault(machine.node, []).append(gpu)
                for node, gpus in reported.items():
                    key = (self.machines[node].pk, job.scheduler_id)
                    if set(found.get(key, ())) != set(gpus) and self.is_credible(job, self.machines[node], gpus):
                        found[key] = gpus
        return found

    def is_credible(self, job: Running, machine: ReportingMachine, gpus: Sequence[GpuPosition]) -> bool:
        """Return whether a job can have these GPUs of a machine, as its own program reports.

        No more than the scheduler gave it there; none with another job's process; and one that the scheduler assigned
        to another job only if a process of this job runs on it.
        """
        allotted = job.gpu_indices.get(machine.node) or range(-(-job.gpus // max(1, len(job.nodes))))
        return len(gpus) <= len(allotted) and (
            machine.has_mig or all(self._can_have(job, machine, gpu) for gpu in gpus)
        )

    def is_refuted(self, job: Running, machine: ReportingMachine, gpu: GpuPosition) -> bool:
        """Return whether another job's process runs on the GPU."""
        processes = machine.job_processes.get(gpu.uuid, ())
        return not machine.has_mig and any(self.job_of(machine, gpu, process) is not job for process in processes)

    def _can_have(self, job: Running, machine: ReportingMachine, gpu: GpuPosition) -> bool:
        processes = machine.job_processes.get(gpu.uuid, ())
        is_of_job = [self.job_of(machine, gpu, process) is job for process in processes]
        is_assigned_elsewhere = job.scheduler_id not in self.assigned.get(gpu.pk, (job.scheduler_id,))
        return all(is_of_job) and (bool(is_of_job) or not is_assigned_elsewhere)


def _device_number(gpu: GpuPosition) -> int:
    """Return N of /dev/nvidiaN if the agent reports it, else NVML's index."""
    return gpu.number if gpu.minor is None else gpu.minor


def _may_belong(job: Running, machine: ReportingMachine, process: Mapping[str, Any]) -> bool:
    """Return whether a process can be this job's. Without a control group its environment decides, which may lie."""
    is_there = machine.scheduler_gpus is None or machine.node in job.nodes
    return is_there and (process["user"] == job.user or not process["user"] or process["user"].isdigit())


def _may_be_task_id(number: str, scheduler_id: str) -> bool:
    """Return whether a job id can be a task of an array: Slurm numbers tasks from the array's id upwards."""
    array = scheduler_id.partition("_")[0]
    return number.isdecimal() and array.isdecimal() and int(number) >= int(array)
