"""Who is said to hold which GPU: by the scheduler's indices, by processes, by the jobs' launchers.

The launcher knows best: it asks NVML for what it was given. Processes are seen only while there are some, so they alone
tell of jobs whose scheduler says no indices.
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
from nodes.schedulers.cluster import ALLOCATED_STATES

Source = Holding.Source
Key = tuple[int, str]  # of a GPU and of a job
Told = dict[tuple[int, str], list["Place"]]  # GPUs by machine and job
MOST_NAMED = 64  # GPUs by one word of a launcher's


class Claim(NamedTuple):
    """A job that is said to hold a GPU."""

    gpu_id: int
    agent_id: int
    scheduler_id: str
    user: str
    name: str
    source: str
    since: datetime


class Word(NamedTuple):
    """What a launcher has told: the GPUs that it was given on its node."""

    scheduler_id: str
    uuids: Sequence[str]


class Place(NamedTuple):
    """A GPU where it sits; `number` is NVML's, `minor` N of /dev/nvidiaN."""

    pk: int
    uuid: str
    agent_id: int
    number: int
    minor: int | None


class Running(NamedTuple):
    """A job that has its nodes, as the scheduler's queue tells of it."""

    scheduler_id: str
    user: str
    name: str
    nodes: Sequence[str]
    gpus: int
    gpu_indices: Mapping[str, Sequence[int]]
    started_at: datetime | None


@dataclass
class Machine:
    """One with an agent; `told` is how many GPUs the scheduler says it has, None where it does not know the machine."""

    pk: int
    node: str
    processes: Sequence[Mapping[str, Any]]
    told: int | None
    is_cut: bool = False
    gpus: list[Place] = field(default_factory=list)

    @cached_property
    def by_place(self) -> dict[int, Place]:
        """By the number that the scheduler has for each; empty where its numbers are not of whole GPUs.

        Slurm counts the device files that gres.conf names for the node, from 0 whatever their own numbers are. Where
        it names as many as there are, that is their order; else the file's own number is the best guess.
        """
        if settings.VIGIL_SCHEDULER == "local":
            return {gpu.number: gpu for gpu in self.gpus}
        if self.told == len(self.gpus):
            return dict(enumerate(sorted(self.gpus, key=_file)))
        return {} if self.is_cut else {_file(gpu): gpu for gpu in self.gpus}

    @cached_property
    def jobs_on(self) -> dict[str, list[Mapping[str, Any]]]:
        """The processes that name a job, by GPU."""
        found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for process in self.processes:
            if process["job"]:
                found[process["gpu"]].append(process)
        return found


@dataclass
class Seen:
    """What agents and the scheduler say at one moment."""

    machines: dict[str, Machine]
    running: dict[str, Running]
    now: datetime

    @classmethod
    def read(cls, now: datetime) -> Self:
        """All of it, in five queries."""
        told = dict(Node.objects.told().values_list("name", "gpus"))
        agents = Agent.objects.filter(is_made_up=False, heard_at__isnull=False)
        machines = {
            pk: Machine(pk, node, processes if heard_at and heard_at >= now - SILENT else (), told.get(node))
            for pk, node, heard_at, processes in agents.values_list("pk", "node", "heard_at", "processes")
        }
        there = Gpu.objects.filter(gone_at=None).order_by()
        for row in there.values_list("pk", "uuid", "agent_id", "index", "minor"):
            if machine := machines.get(row[2]):
                machine.gpus.append(Place(*row))
        for pk in there.filter(facts__mig=True).values_list("agent_id", flat=True):
            if machine := machines.get(pk):
                machine.is_cut = True
        queue = QueuedJob.objects.filter(state__in=ALLOCATED_STATES, is_made_up=False).order_by()
        rows = (Running(*row) for row in queue.values_list(*Running._fields))
        return cls({one.node: one for one in machines.values()}, {job.scheduler_id: job for job in rows}, now)

    def claim(self, gpu: Place, job: Running, source: str) -> Claim:
        since = job.started_at or self.now
        return Claim(gpu.pk, gpu.agent_id, job.scheduler_id, job.user, job.name, source, since)

    @cached_property
    def by_scheduler(self) -> dict[Key, Claim]:
        """What the scheduler's indices say."""
        found = {}
        for job in self.running.values():
            for node, indices in job.gpu_indices.items():
                places = machine.by_place if (machine := self.machines.get(node)) else {}
                for gpu in filter(None, map(places.get, indices)):
                    found[gpu.pk, job.scheduler_id] = self.claim(gpu, job, Source.SCHEDULER)
        return found

    @cached_property
    def given(self) -> dict[int, list[str]]:
        """The jobs that the scheduler's indices give each GPU to."""
        found = defaultdict(list)
        for gpu_id, scheduler_id in self.by_scheduler:
            found[gpu_id].append(scheduler_id)
        return found

    @cached_property
    def by_processes(self) -> dict[Key, Claim]:
        """What processes say of jobs whose scheduler tells no indices there."""
        found = {}
        for machine in self.machines.values():
            gpus = {gpu.uuid: gpu for gpu in machine.gpus} if machine.jobs_on else {}
            for uuid, processes in machine.jobs_on.items():
                for process in processes if uuid in gpus else ():
                    if claim := self._by_process(machine, gpus[uuid], process):
                        found[claim.gpu_id, claim.scheduler_id] = claim
        return found

    def _by_process(self, machine: Machine, gpu: Place, process: Mapping[str, Any]) -> Claim | None:
        job = self.job_of(machine, gpu, process)
        if job is None:
            if gpu.pk in self.given:  # by a number that the queue does not have, as of one task of an array
                return None
            user, name = process["user"], process["job"]
            return Claim(gpu.pk, machine.pk, name, user, "", Source.PROCESSES, self.now)
        if (job.gpu_indices.get(machine.node) and machine.by_place) or not _may_be(job, machine, process):
            return None
        return self.claim(gpu, job, Source.PROCESSES)

    def job_of(self, machine: Machine, gpu: Place, process: Mapping[str, Any]) -> Running | None:
        """The job that a process is of. A task of an array is "<array>_<task>" in the queue, but a number here."""
        number, user = process["job"], process["user"]
        if job := self.running.get(number):
            return job
        there = [one for one in self._tasks.get((machine.node, user), ()) if _may_be_task(number, one.scheduler_id)]
        given = [one for one in there if one.scheduler_id in self.given.get(gpu.pk, ())]
        return next(iter(given), None) or (there[0] if len(there) == 1 else None)

    @cached_property
    def _tasks(self) -> dict[tuple[str, str], list[Running]]:
        """Running tasks of arrays, by node and user."""
        found = defaultdict(list)
        for job in self.running.values():
            if "_" in job.scheduler_id:
                for node in job.nodes:
                    found[node, job.user].append(job)
        return found

    def by_launchers(self, words: Iterable[Word], standing: Told) -> Told:
        """What launchers say: what stands, but for the last word on a machine that can be believed."""
        places = {gpu.uuid: (machine, gpu) for machine in self.machines.values() for gpu in machine.gpus}
        found = {**standing}
        for word in words:
            if job := self.running.get(word.scheduler_id):
                named: dict[str, list[Place]] = {}
                for uuid in word.uuids:
                    machine, gpu = places.get(uuid, (None, None))
                    if machine and gpu and machine.node in job.nodes:
                        named.setdefault(machine.node, []).append(gpu)
                for node, gpus in named.items():
                    key = (self.machines[node].pk, job.scheduler_id)
                    if set(found.get(key, ())) != set(gpus) and self.believes(job, self.machines[node], gpus):
                        found[key] = gpus
        return found

    def believes(self, job: Running, machine: Machine, gpus: Sequence[Place]) -> bool:
        """Whether a job may hold these of a machine's GPUs, by its own program's word.

        Of no more than the scheduler gave it there, of none on which another job's process is seen, and of one that the
        scheduler gave to somebody else only where a process of its own is seen.
        """
        given = job.gpu_indices.get(machine.node) or range(-(-job.gpus // max(1, len(job.nodes))))
        return len(gpus) <= len(given) and (machine.is_cut or all(self._may_hold(job, machine, gpu) for gpu in gpus))

    def is_refuted(self, job: Running, machine: Machine, gpu: Place) -> bool:
        """Whether another job's process is seen on it."""
        processes = machine.jobs_on.get(gpu.uuid, ())
        return not machine.is_cut and any(self.job_of(machine, gpu, one) is not job for one in processes)

    def _may_hold(self, job: Running, machine: Machine, gpu: Place) -> bool:
        processes = machine.jobs_on.get(gpu.uuid, ())
        mine = [self.job_of(machine, gpu, one) is job for one in processes]
        is_others = job.scheduler_id not in self.given.get(gpu.pk, (job.scheduler_id,))
        return all(mine) and (bool(mine) or not is_others)


def _file(gpu: Place) -> int:
    """N of /dev/nvidiaN, where the agent tells that, else NVML's index."""
    return gpu.number if gpu.minor is None else gpu.minor


def _may_be(job: Running, machine: Machine, process: Mapping[str, Any]) -> bool:
    """Whether a process may be this job's: where no control group tells, its own environment does, and may lie."""
    is_there = machine.told is None or machine.node in job.nodes
    return is_there and (process["user"] == job.user or not process["user"] or process["user"].isdigit())


def _may_be_task(number: str, scheduler_id: str) -> bool:
    """Slurm numbers the tasks of an array from the array's own number on."""
    array = scheduler_id.partition("_")[0]
    return number.isdecimal() and array.isdecimal() and int(number) >= int(array)
