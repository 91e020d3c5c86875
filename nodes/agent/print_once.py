"""Print one sample of everything that this node would report."""

from __future__ import annotations

import json
import select
import signal
import time
from typing import Any

from gpus.reader import GpuReader
from gpus.reports import GpuCounters, GpuSamples
from nodes.agent import disks
from nodes.agent.facts import facts
from nodes.agent.gpus.history import GpuHistory
from nodes.agent.gpus.processes import GpuProcesses
from nodes.agent.gpus.samples import SampleWindow
from nodes.agent.gpus.watch import GpuWatch
from nodes.agent.host import HostSampler
from nodes.agent.kernel_log.reader import KernelLog
from nodes.agent.log import log
from nodes.agent.mounts import MountProbes
from nodes.agent.settings import AgentSettings, InvalidSetting, read_settings
from nodes.agent.software import SoftwareProbe

MAX_SECONDS = 20.0  # for NVML: a driver that initialises GPUs when it is opened takes a second for each
RATE_SECONDS = 1.0


def main(*, as_json: bool) -> int:
    """Print a sample; return 1 if NVML does not respond."""
    try:
        settings = read_settings(posts=False)
    except InvalidSetting as error:
        log(str(error))
        return 1
    report = sample(settings)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may close the pipe early
    print(json.dumps(report, indent=2) if as_json else "\n".join(lines(report)))
    return 1 if report["silent"] else 0


def sample(settings: AgentSettings) -> dict[str, Any]:
    """Return facts, a sample of every GPU, the host, and the processes on GPUs."""
    host, mounts = HostSampler(), MountProbes()
    probed = disks.probed(settings.mounts, host.proc)
    host.sample()
    software = SoftwareProbe()
    software.poll()
    mounts.start_probes(probed)
    watch = GpuWatch(
        GpuReader(every=1.0, detailed=True), GpuHistory(settings.state), SampleWindow(1.0), lambda event: None
    )
    samples, counters = _read_gpus(watch)
    mounts.poll(time.time())
    processes = GpuProcesses()
    processes.payloads(counters, watch.gpus)  # starts the look-up of user names
    software.wait(2.0)
    kernel_log = KernelLog(settings.kmsg)
    kernel_log.open()
    problems = {"kernel_log": kernel_log.problem, "gpus": watch.absent.why if watch.absent else ""}
    report = {
        "facts": facts(
            node=settings.node,
            machine=watch.reader.inventory,
            gpus=watch.described_gpus(),
            problems=problems,
            probed=probed,
            software=software.facts(),
        ),
        "at": round(time.time(), 3),
        "silent": watch.absent is None and samples is None,
        "gpus": [_gpu(watch, samples, counters, place) for place in range(len(watch.gpus))],
        "host": {**host.sample(), **mounts.values()},
        "processes": processes.payloads(counters, watch.gpus),
    }
    watch.reader.close()
    mounts.close()
    software.close()
    return report


def _read_gpus(watch: GpuWatch) -> tuple[GpuSamples | None, GpuCounters | None]:
    """Return the second sample, because rates need two, and the counters; None if NVML does not respond."""
    began = time.monotonic()
    samples: list[GpuSamples] = []
    while (now := time.monotonic()) - began < MAX_SECONDS:
        watch.poll()
        newest = watch.reader.newest
        if newest is not None and newest not in samples:
            samples.append(newest)
        is_enough = watch.absent is not None or (len(samples) > 1 and watch.counters is not None)
        if is_enough and now - began >= RATE_SECONDS:
            break
        file = watch.reader.fileno()
        select.select([] if file is None or watch.absent else [file], [], [], 0.1)
    return samples[-1] if samples else None, watch.counters


def _gpu(watch: GpuWatch, samples: GpuSamples | None, counters: GpuCounters | None, index: int) -> dict[str, Any]:
    gpu_sample = samples.samples[index] if samples and index < len(samples.samples) else {}
    counted = counters.counters[index] if counters and index < len(counters.counters) else {}
    identity = {"uuid": watch.gpus[index].uuid, "index": watch.gpus[index].index, "name": watch.gpus[index].name}
    return {**identity, "lost": gpu_sample is None, **(gpu_sample or {}), "counters": dict(counted)}


def lines(report: dict[str, Any]) -> list[str]:
    """Format a report for people."""
    node_facts, host = report["facts"], report["host"]
    found = [
        f"{node_facts['host']}: {node_facts['kernel']}, {node_facts['cpus']} CPUs,"
        f" {node_facts['memory_mib'] / 1024:.0f} GiB"
    ]
    if report["silent"]:
        found.append("NVML does not respond.")
    elif not report["gpus"]:
        found.append(f"GPUs are not monitored: {node_facts['problems'].get('gpus') or 'NVML lists none.'}")
    found += [_line_of_gpu(gpu) for gpu in report["gpus"]]
    if why := node_facts["problems"].get("kernel_log"):
        found.append(f"The kernel log cannot be read: {why}")
    found += [f"  {name:32} {_value(name, value)}" for name, value in sorted(host.items())]
    return found + [_line_of_process(process) for process in report["processes"]]


def _value(name: str, value: float | None) -> str:
    if value is None:
        return "hangs" if name.startswith("mount_ms:") else "unknown"
    return f"{value:g}"


def _line_of_gpu(gpu: dict[str, Any]) -> str:
    head = f"GPU {gpu['index']} {gpu['name']} {gpu['uuid']}:"
    if gpu["lost"]:
        return f"{head} lost"
    shown = (
        ("gpu_percent", "%"),
        ("memory_mib", " MiB"),
        ("temperature_c", " °C"),
        ("watts", " W"),
        ("sm_mhz", " MHz"),
    )
    return f"{head} " + ", ".join(f"{gpu[name]}{unit}" for name, unit in shown if name in gpu)


def _line_of_process(process: dict[str, Any]) -> str:
    job = f" of job {process['job']}" if process["job"] else ""
    return f"Process {process['pid']} {process['name']} ({process['user']}){job} on {process['gpu']}"
