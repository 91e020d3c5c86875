"""Generate three weeks of telemetry of the demo lab's machines, and continue it while the demo runs.

Values are a function of GPU and second, so that the past and the samples added every ten seconds fit together.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from console.demo.cluster import GPUS
from console.demo.scenarios import NODES
from jobs.models import Attempt
from jobs.waste import aggregation
from nodes.models import Agent, Gpu, GpuUse, Holding, QueuedJob, RackPlace
from nodes.telemetry import events, intake, machines, thin
from nodes.telemetry.fields import GPU_FIELDS, WINDOW_S, gpu_owner, host_owner
from nodes.telemetry.wire import MISSING, MachineEvent, SampleBatch, TelemetryPost
from portal.series import store
from portal.series.codec import Floats, Integers, Points
from portal.series.store import Owner

DAY_S, HOUR_S = 86_400, 3600
WEEKS_S = 21 * DAY_S
# stored by the second; earlier samples by the minute, and those older than two days by ten minutes
SECONDS_S = 2 * WINDOW_S
PERIOD_S = 10
IDLE = ("dgx-02", 6)  # a forgotten notebook
LOST = ("dgx-03", 5)
DAMAGED, REMAPPING = ("dgx-08", 2), ("dgx-01", 6)
HOT = ("dgx-07", "dgx-08")  # in one rack with warm inlet air
RACKS = {"A1": ("dgx-01", "dgx-02", "dgx-03"), "A2": ("dgx-04", "dgx-05", "dgx-06"), "A3": HOT}
LOST_HOURS = 10.02  # just before the end of the attempt that failed with it (console.demo.scenarios)
MODEL, MEMORY_MIB, CAP_WATTS, SLOWDOWN_C = "NVIDIA H100 80GB HBM3", 81_559, 700, 87
DRIVER, OLD_DRIVER = "570.195.03", ("dgx-05", "570.172.08")
_STREAM = "de300000000000de"


@dataclass(frozen=True)
class GpuActivity:
    """Generates one GPU's values: fields × seconds."""

    node: str
    index: int

    def values(self, second: Integers, is_allocated: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Return values of a busy GPU with a dip at each save while it is allocated, else of an idle one."""
        busy = is_allocated & ((self.node, self.index) != IDLE)
        noise = _noise(second, zlib.crc32(f"{self.node}/{self.index}".encode()))
        saving = (second + 37 * self.index) % 900 < 14
        percent = np.where(busy, np.where(saving, 6 + 4 * noise, 93 + 5 * noise), 0)
        watts = np.where(busy, np.where(saving, 180 + 20 * noise, 610 + 60 * noise), 74 + 3 * noise)
        air = 8 if self.node in HOT else 0
        day = 2.0 * np.sin(2 * np.pi * (second % DAY_S) / DAY_S)
        celsius = np.where(busy, 61 + self.index + air + 2 * noise, 33 + air / 2 + noise) + day
        memory = np.where(is_allocated, 3_100 if (self.node, self.index) == IDLE else 71_800 + 40 * self.index, 4)
        link = np.where(busy & ~saving, 8_200 + 900 * noise, 0)
        fields = {
            "gpu_percent": percent, "sm_percent": percent * 0.91, "memory_mib": memory, "temperature_c": celsius,
            "memory_temperature_c": celsius + 9, "watts": watts,
            "sm_mhz": np.where(busy, 1_755 - 25 * (celsius > 80), 345),
            "throttle": np.where(celsius > 82, 64, 0), "nvlink_tx_mib": link, "nvlink_rx_mib": link,
            "pcie_tx_mib": link / 9, "pcie_rx_mib": link / 12,
        }  # fmt: skip
        return np.array([np.clip(np.rint(fields[name]), 0, 2**30) for name in GPU_FIELDS], np.int32)


def make(past: Iterable[Attempt] = (), *, now: float | None = None) -> None:
    """Create the machines, GPUs, allocations, events and three weeks of samples that are missing.

    `past`: attempts that ended, whose GPUs show their use.
    """
    now = time.time() if now is None else now
    names = [name for name, *_ in NODES]
    existing = set(Agent.objects.filter(node__in=names).values_list("node", flat=True))
    new = [
        Agent.objects.create(node=name, is_made_up=True, version="demo", heard_at=_moment(now))
        for name in names
        if name not in existing
    ]
    for agent in new:
        machines.note_facts(agent, _facts(agent.node), _moment(now - WEEKS_S))
        machines.note_counters(agent, _counters(agent.node, now))
        agent.save()
    allocate_gpus(now)
    if new and not RackPlace.objects.exists():
        RackPlace.objects.bulk_create(
            RackPlace(node=node, rack=rack, slot=slot)
            for rack, there in RACKS.items()
            for slot, node in enumerate(there, 1)
        )
    if new:
        Holding.objects.bulk_create([use for attempt in past for use in _past_holdings(attempt)])
        GpuUse.objects.bulk_create(_gpu_use(now), ignore_conflicts=True)
        aggregation.update_sums()
    for agent in new:
        _write_past(agent, int(now))


def report_now(now: float | None = None) -> None:
    """Add ten more seconds of samples for each machine, through the intake of agents' posts."""
    now = time.time() if now is None else now
    at = int(now) // PERIOD_S * PERIOD_S - PERIOD_S
    allocate_gpus(now)
    for agent in Agent.objects.filter(is_made_up=True, node__in=[name for name, *_ in NODES]):
        second = np.arange(at, at + PERIOD_S, dtype=np.int64)
        present_gpus = _present_gpus(agent)
        values = np.stack([_gpu_values(agent, gpu, second) for gpu in present_gpus], axis=1)
        batch = SampleBatch(
            at, 1, [gpu.uuid for gpu in present_gpus], values, _host(agent, at), _processes(agent, present_gpus), []
        )
        stream = agent.streams.filter(uid=_STREAM).first()
        first = stream.next_seq if stream else 0
        if not Agent.objects.filter(pk=agent.pk, is_made_up=True).exists():
            continue  # its own agent has just reported
        intake.take(agent.pk, TelemetryPost(_STREAM, first, 0, f"demo-{agent.pk}", "demo", now, [batch]), now=now)


def allocate_gpus(now: float) -> None:
    """Record which made-up jobs have which GPUs allocated."""
    gpus = {
        (gpu.agent.node, gpu.index): gpu for gpu in Gpu.objects.filter(agent__is_made_up=True).select_related("agent")
    }
    open_holdings = set(Holding.objects.filter(until=None, is_made_up=True).values_list("gpu_id", "scheduler_id"))
    for job in QueuedJob.objects.filter(is_made_up=True, state="running"):
        for node, indices in job.gpu_indices.items():
            for gpu in (gpus[node, index] for index in indices if (node, index) in gpus):
                if (gpu.pk, job.scheduler_id) not in open_holdings:
                    _allocate(gpu, job)


def _allocate(gpu: Gpu, job: QueuedJob) -> None:
    Holding.objects.create(
        gpu=gpu, agent_id=gpu.agent_id, scheduler_id=job.scheduler_id, user=job.user, name=job.name[:255],
        source=Holding.Source.SCHEDULER, since=job.started_at or datetime.now(UTC), is_made_up=True,
    )  # fmt: skip


def _past_holdings(attempt: Attempt) -> Iterator[Holding]:
    """Yield the GPU allocations of an ended attempt, on those of its nodes that are made up."""
    spec, started = attempt.job.spec, attempt.started_at or attempt.created_at
    gpus_per_node = int((spec.get("resources") or {}).get("gpus_per_node") or 0)
    for gpu in Gpu.objects.filter(agent__node__in=attempt.nodes, agent__is_made_up=True, index__lt=gpus_per_node):
        yield Holding(
            gpu=gpu, agent_id=gpu.agent_id, scheduler_id=attempt.scheduler_id, user=attempt.job.owner.username,
            name=attempt.job.name, source=Holding.Source.LAUNCHER, since=started, until=attempt.ended_at,
            is_made_up=True,
        )  # fmt: skip


def _gpu_use(now: float) -> Iterator[GpuUse]:
    """Yield GPU-seconds by job and day, as the counter would have summed them."""
    found: dict[tuple[int, str], GpuUse] = {}
    for holding in Holding.objects.filter(is_made_up=True).select_related("gpu__agent"):
        is_idle = (holding.gpu.agent.node, holding.gpu.index) == IDLE
        begin, end = holding.since.timestamp(), holding.until.timestamp() if holding.until else now
        for day in range(int(begin // DAY_S), int(end // DAY_S) + 1):
            seconds = max(0.0, min(end, (day + 1) * DAY_S) - max(begin, day * DAY_S))
            fresh = GpuUse(
                day=_moment(day * DAY_S).date(), scheduler_id=holding.scheduler_id, user=holding.user, is_made_up=True
            )
            use = found.setdefault((day, holding.scheduler_id), fresh)
            use.held_s += seconds
            use.used_s += 0.0 if is_idle else 0.91 * seconds
            use.idle_s += seconds if is_idle else 0.002 * seconds
    yield from found.values()


def _write_past(agent: Agent, now: int) -> None:
    for gpu in agent.gpus.all():

        def values(second: Integers, gpu: Gpu = gpu) -> Floats:
            return _gpu_values(agent, gpu, second).astype(np.float64)

        _write(gpu_owner(gpu.pk), GPU_FIELDS, now, values)
    names = tuple(_host(agent, now))
    _write(host_owner(agent.pk), names, now, lambda second: _host_columns(agent, names, second))
    if agent.node == LOST[0]:
        _lose(agent, now - int(LOST_HOURS * HOUR_S))
    seconds = now // WINDOW_S * WINDOW_S
    Agent.objects.filter(pk=agent.pk).update(
        facts=agent.facts,
        boot_id=f"demo-{agent.pk}",
        merged_to=seconds,
        minutes_to=thin_end(now, 60),
        tens_to=thin_end(now, 600),
        newest={"gpus": {gpu.uuid: _newest(gpu, now) for gpu in _present_gpus(agent)}},
    )


def _newest(gpu: Gpu, now: int) -> dict[str, int]:
    """Return the newest values of a GPU that is idle, with the time since which it is."""
    holding = gpu.holdings.filter(until=None).first()
    return {"gpu_percent": 0, "quiet_since": int(holding.since.timestamp()) if holding else now - WEEKS_S}


def thin_end(now: int, seconds: int) -> int:
    """Return up to when the past is stored in steps of this length."""
    begin = {60: now - SECONDS_S, 600: now - 2 * DAY_S}[seconds]
    return begin // WINDOW_S * WINDOW_S


def _write(owner: Owner, names: Sequence[str], now: int, columns: Callable[[Integers], NDArray[np.float64]]) -> None:
    """Write three weeks of an owner's series: ten minutes, minutes, and the last half hour by the second."""
    minutes, tens = thin_end(now, 60), thin_end(now, 600)
    newest = now // PERIOD_S * PERIOD_S
    for seconds, start, stop in ((600, now - WEEKS_S, tens), (60, tens, minutes), (1, minutes, newest)):
        step = np.arange(start // seconds * seconds, stop, seconds, dtype=np.int64)
        values = columns(step)
        for row, name in enumerate(names):
            kinds = ("",) if seconds == 1 else ("", "min", "max")
            for column in kinds:
                wobble = {"": 0.0, "min": -0.04, "max": 0.03}[column] * np.abs(values[row])
                present = values[row] != MISSING
                value = np.rint(values[row] + wobble)[present]
                _write_chunks(owner, thin.thinned(name, seconds), column, step[present], value)


def _write_chunks(owner: Owner, name: str, column: str, step: Integers, value: Floats) -> None:
    series_id = store.declare(owner, [name], column=column)[name]
    parts = [slice(at, at + WINDOW_S) for at in range(0, len(step), WINDOW_S)]
    points = [Points(step[part], np.full(len(step[part]), float(step[part][0])), value[part]) for part in parts]
    store.insert([store.merged_row(series_id, 0, 0, chunk) for chunk in points])


def _gpu_values(agent: Agent, gpu: Gpu, second: Integers) -> NDArray[np.int32]:
    allocated = np.zeros(len(second), np.bool_)
    for holding in gpu.holdings.all():
        until = holding.until.timestamp() if holding.until else np.inf
        allocated |= (second >= holding.since.timestamp()) & (second < until)
    # Earlier jobs, of which no records remain, used the GPU before the present ones: nights and weekends are quiet.
    began = min((holding.since.timestamp() for holding in gpu.holdings.all()), default=np.inf)
    earlier = (second < began) & (agent.node != "dgx-04") & (((second // 20_000 + gpu.index // 4) % 5) > 0)
    values = GpuActivity(agent.node, gpu.index).values(
        second, allocated | (earlier & (second < second.max() - 2 * HOUR_S))
    )
    if (agent.node, gpu.index) == LOST:
        values[:, second > time.time() - LOST_HOURS * HOUR_S] = MISSING
    return values


def _present_gpus(agent: Agent) -> list[Gpu]:
    return [gpu for gpu in agent.gpus.filter(gone_at=None) if (agent.node, gpu.index) != LOST]


def _lose(agent: Agent, at: int) -> None:
    gpu = agent.gpus.get(index=LOST[1])
    text = "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    xid = {"xid": 79, "text": text, "seq": 4_711, "bus": gpu.bus, "confirmed": True}
    both = (("xid", xid), ("gpu.lost", {"index": gpu.index}))
    events.store(agent, [MachineEvent(kind, float(at), gpu.uuid, more) for kind, more in both], f"demo-{agent.pk}")


def _host(agent: Agent, at: int) -> dict[str, float]:
    columns = _host_columns(agent, _HOST, np.array([at], np.int64))
    return {name: float(columns[row, 0]) for row, name in enumerate(_HOST)}


_HOST = (
    "cpu_percent",
    "load_1",
    "memory_used_mib",
    "memory_total_mib",
    "net_rx_mib:bond0",
    "net_tx_mib:bond0",
    "mount_ms:/data",
)


def _host_columns(agent: Agent, names: Sequence[str], second: Integers) -> NDArray[np.float64]:
    noise = _noise(second, zlib.crc32(agent.node.encode()))
    used = next(used for name, _, used, _ in NODES if name == agent.node)
    host = {
        "cpu_percent": 3 + 4.2 * used + 3 * noise, "load_1": 26.0 * used + 5 * noise,
        "memory_used_mib": 180_000 + 98_000 * used + 900 * noise, "memory_total_mib": np.full(len(second), 2_064_384.0),
        "net_rx_mib:bond0": 11 + 34 * used + 20 * noise, "net_tx_mib:bond0": 4 + 9 * used + 6 * noise,
        "mount_ms:/data": 2 + 1.5 * noise,
    }  # fmt: skip
    columns: Floats = np.maximum(0, np.array([np.rint(host[name] * 10) / 10 for name in names]))
    return columns


def _processes(agent: Agent, there: Sequence[Gpu]) -> list[Any]:
    from nodes.telemetry.wire import ReportedProcess

    found = []
    for gpu in there:
        for holding in gpu.holdings.filter(until=None):
            is_idle = (agent.node, gpu.index) == IDLE
            name, memory = ("jupyter-lab", 3_096) if is_idle else ("python", 71_700)
            found.append(
                ReportedProcess(gpu.uuid, 20_000 + gpu.pk, holding.user[:64], name, memory, holding.scheduler_id)
            )
    return found


def _facts(node: str) -> dict[str, Any]:
    mark = zlib.crc32(node.encode())
    same = {
        "name": MODEL, "memory_mib": MEMORY_MIB, "power_cap_watts": CAP_WATTS, "slowdown_c": SLOWDOWN_C,
        "vbios": "96.00.89.00.01", "inforom": "G520.0200.00.05",
    }  # fmt: skip
    gpus = [
        {
            "uuid": f"GPU-{mark:08x}-d3m0-4000-8000-{i:012x}",
            "index": i,
            "minor": i,
            "bus": f"00000000:{0x1A + 0x10 * i:02X}:00.0",
            **same,
        }
        for i in range(GPUS)
    ]
    return {
        "host": node, "kernel": "Linux 6.8.0-52-generic", "system": "DGX OS 7.1", "agent": "demo", "cpus": 224,
        "driver": OLD_DRIVER[1] if node == OLD_DRIVER[0] else DRIVER, "cuda": "12.8", "nccl": "2.26.2",
        "fabric_manager": DRIVER, "slurm": "24.11.5", "container_toolkit": "1.17.8",
        "adapters": [{"name": f"mlx5_{i}", "board": "MT_0000000838", "firmware": "28.43.2026"} for i in range(8)],
        "memory_mib": 2_064_384, "mounts": ["/data"], "gpus": gpus,
    }  # fmt: skip


def _counters(node: str, now: float) -> dict[str, tuple[dict[str, Any], datetime]]:
    """Return the slow counters of its GPUs: one has an uncorrectable memory error, one a row to remap."""
    found = {}
    for gpu in _facts(node)["gpus"]:
        place = (node, gpu["index"])
        counters = {
            "ecc_corrected": 3 if place == DAMAGED else 0, "ecc_uncorrected": int(place == DAMAGED),
            "ecc_corrected_lifetime": 41 if place == DAMAGED else gpu["index"],
            "ecc_uncorrected_lifetime": int(place == DAMAGED),
            "sram_threshold_exceeded": 0, "remapped_corrected": 0, "remapped_uncorrected": int(place == DAMAGED),
            "remapped_pending": int(place == REMAPPING), "remapped_failed": 0, "pcie_replays": 0,
            "pcie_generation": 5, "pcie_generation_most": 5, "pcie_width": 16, "pcie_width_most": 16,
            "power_cap_watts": CAP_WATTS, "recovery_action": int(place == DAMAGED), "nvlinks": [1] * 18,
        }  # fmt: skip
        found[gpu["uuid"]] = (counters, _moment(now))
    return found


def _moment(second: float) -> datetime:
    return datetime.fromtimestamp(second, UTC)


def _noise(second: Integers, mark: int) -> Floats:
    """Return values between -1 and 1, the same for the same second."""
    mixed = (second * 2_654_435_761 + mark * 40_503) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2_246_822_519) & 0xFFFFFFFF
    noise: Floats = ((mixed ^ (mixed >> 13)) & 0xFFFF) / 32_768.0 - 1.0
    return noise
