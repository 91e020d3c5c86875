"""A cluster of any size in the database, for benches and for looking at pages: nodes, agents, GPUs, racks, a queue."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

GPUS = 8
NODES_PER_RACK = 8
PEOPLE = ("mira", "noor", "oskar", "tomas.varga", "yuki", "ada.lindqvist", "jonas.weber", "kofi.mensah", "lena", "hugo")


@dataclass(frozen=True)
class SimulatedFleet:
    """The simulated agents by node, with the UUIDs of their GPUs."""

    nodes: list[str]
    uuids: dict[str, list[str]]


def make(
    nodes: int,
    *,
    now: datetime | None = None,
    racks: bool = True,
    cpu_nodes: int = 0,
    seed: int = 7,
    nodes_per_rack: int = NODES_PER_RACK,
    made_up: bool = False,
) -> SimulatedFleet:
    """Create nodes with eight GPUs each; some drained, lost, hot, silent, idle and held, as in any lab.

    `made_up`: for a portal that is running, whose scheduler knows none of them.
    """
    from nodes.models import Agent, Gpu, Holding, Node, Partition, QueuedJob, RackPlace

    now, rng = now or timezone.now(), random.Random(seed)
    names = [f"dgx-{i:0{max(2, len(str(nodes)))}d}" for i in range(1, nodes + 1)]
    uuids = {name: [f"GPU-{n:08x}-{i:04x}-0000-0000-000000000000" for i in range(GPUS)] for n, name in enumerate(names)}
    Partition.objects.get_or_create(name="h100", defaults={"is_default": True, "is_made_up": made_up})
    taken = {name: _allocated_jobs(rng, i, nodes) for i, name in enumerate(names)}
    machines = [_node(name, i, taken[name], now) for i, name in enumerate(names)]
    machines += [
        Node(name=f"cpu-{i:02d}", state="mixed", partitions=["cpu"], cpus=128, cpus_used=16 * (i % 9), memory_mib=1)
        for i in range(1, cpu_nodes + 1)
    ]
    unsaved = [_agent(name, i, uuids[name], taken[name], rng, now) for i, name in enumerate(names)]
    for row in (*machines, *unsaved):
        row.is_made_up = made_up
    Node.objects.bulk_create(machines, batch_size=200)
    agents = Agent.objects.bulk_create(unsaved, batch_size=200)
    gpus = Gpu.objects.bulk_create(
        [_gpu(agent, i, uuid, now) for agent in agents for i, uuid in enumerate(uuids[agent.node])], batch_size=500
    )
    jobs: dict[str, QueuedJob] = {}
    holdings = []
    for gpu in gpus:
        job = taken[gpu.agent.node][gpu.index]
        if job is not None:
            queued = jobs.setdefault(str(job), _job(job, now))
            if gpu.agent.node not in queued.nodes:
                queued.nodes.append(gpu.agent.node)
            queued.gpu_indices.setdefault(gpu.agent.node, []).append(gpu.index)
            queued.gpus += 1
            job_fields = {"scheduler_id": str(job), "user": queued.user, "name": queued.name, "source": "scheduler"}
            holdings.append(Holding(gpu=gpu, agent=gpu.agent, since=now - timedelta(hours=3), **job_fields))
    waiting = [_job(900_000 + i, now, state="pending", gpus=8) for i in range(12)]
    for row in (*jobs.values(), *waiting, *holdings):
        row.is_made_up = made_up
    QueuedJob.objects.bulk_create([*jobs.values(), *waiting], batch_size=200)
    Holding.objects.bulk_create(holdings, batch_size=500)
    if racks:
        RackPlace.objects.bulk_create(
            [
                RackPlace(node=name, rack=f"R{i // nodes_per_rack + 1:02d}", slot=i % nodes_per_rack + 1)
                for i, name in enumerate(names)
            ],
            batch_size=500,
        )
    return SimulatedFleet(names, uuids)


def slow_mount(source: str, *, at: datetime, minutes: float, mount: str = "/home") -> int:
    """Let every machine find a mount slow, each a moment after the one before; return how many events that makes."""
    from nodes.models import Agent, NodeEvent

    events = [
        NodeEvent(
            agent_id=pk, kind="mount.slow", at=at + timedelta(seconds=i % 60), data={"mount": mount, "source": source},
            last_at=at + timedelta(minutes=minutes, seconds=i % 7),
        )
        for i, pk in enumerate(Agent.objects.values_list("pk", flat=True))
    ]  # fmt: skip
    NodeEvent.objects.bulk_create(events, batch_size=200)
    return len(events)


def _allocated_jobs(rng: random.Random, place: int, nodes: int) -> list[int | None]:
    """Return the job that each GPU is allocated to."""
    if _is_out(place):
        return [None] * GPUS
    whole = rng.random()
    if whole < 0.6:
        return [10_000 + place // 4] * GPUS
    if whole < 0.7:
        return [None] * GPUS
    return [20_000 + 8 * place + i // 2 if rng.random() < 0.7 else None for i in range(GPUS)]


def _is_out(place: int) -> bool:
    return place % 37 == 3


def _node(name: str, place: int, taken: Sequence[int | None], now: datetime) -> Any:
    from nodes.models import Node

    used = [i for i, job in enumerate(taken) if job is not None]
    state = "drained" if _is_out(place) else "allocated" if len(used) == GPUS else "mixed" if used else "idle"
    reason = {"reason": "XID 79 on GPU 5", "reason_by": "ops", "reason_at": now} if _is_out(place) else {}
    return Node(
        name=name, state=state, partitions=["h100"], features=["nvlink"], cpus=224, cpus_used=26 * len(used), gpus=GPUS,
        gpus_used=len(used), gpu_type="h100", gpus_allocated=used, memory_mib=2_064_384,
        memory_used_mib=240_000 * len(used), **reason,
    )  # fmt: skip


def _agent(
    name: str, place: int, uuids: Sequence[str], taken: Sequence[int | None], rng: random.Random, now: datetime
) -> Any:
    from nodes.models import Agent

    at = int(now.timestamp()) - 1
    is_silent = place % 61 == 7
    warm = 6 if place // NODES_PER_RACK % 7 == 4 else 0
    gpus, processes = {}, []
    for i, uuid in enumerate(uuids):
        is_idle = taken[i] is None or (place % 11 == 5 and i % 4 == 2)
        percent = 0 if is_idle else rng.randint(55, 100)
        celsius = 31 + i % 5 if is_idle else 52 + i + rng.randint(0, 8) + warm
        celsius = 86 if place % 29 == 11 and i == 3 else celsius
        watts, memory = (70 if is_idle else 380 + percent * 3), (0 if taken[i] is None else 61_000)
        gpus[uuid] = {
            "gpu_percent": percent, "memory_mib": memory, "temperature_c": celsius, "watts": watts, "throttle": 0,
            "quiet_since": at - 7_200 if is_idle else at,
        }  # fmt: skip
        if taken[i] is not None:
            process = {"user": "u", "name": "python train.py", "memory_mib": memory, "job": str(taken[i])}
            processes.append({"gpu": uuid, "pid": 4_000 + i, **process})
    host = {"cpu_percent": 30.0, "load_1": 40.0, "memory_used_mib": 400_000.0, "memory_total_mib": 2_064_384.0}
    return Agent(
        node=name, version="0.1.0", stream=f"{place:016x}", sampled_at=at, clock_offset_s=rng.randint(-3, 9) / 10,
        heard_at=now - timedelta(minutes=20) if is_silent else now, enrolled_at=now - timedelta(days=9),
        enrolled_by="ops", newest={"at": at, "host": host, "gpus": gpus}, processes=processes,
    )  # fmt: skip


def _gpu(agent: Any, index: int, uuid: str, now: datetime) -> Any:
    from nodes.models import Gpu

    place = int(agent.stream, 16)
    return Gpu(
        uuid=uuid, agent=agent, index=index, minor=index, bus=f"00000000:{index + 5:02x}:00.0", model="NVIDIA H100",
        memory_mib=81_559, power_cap_watts=700, slowdown_c=87, lost_at=now if place % 37 == 3 and index == 5 else None,
    )  # fmt: skip


def _job(number: int, now: datetime, *, state: str = "running", gpus: int = 0) -> Any:
    from nodes.models import QueuedJob

    return QueuedJob(
        scheduler_id=str(number), name=f"run-{number}", user=PEOPLE[number * 7 % len(PEOPLE)], state=state, gpus=gpus,
        partition="h100", started_at=now - timedelta(hours=3) if state == "running" else None, nodes=[], gpu_indices={},
        priority=number,
    )  # fmt: skip
