"""One sample of everything, printed: what this node would tell."""

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
from nodes.agent.gpu_watch import GpuWatch
from nodes.agent.host import Host
from nodes.agent.kernel_log import KernelLog
from nodes.agent.mounts import Mounts
from nodes.agent.processes import Processes
from nodes.agent.remembered import Remembered
from nodes.agent.samples import Samples
from nodes.agent.settings import Settings, WrongSetting, read_settings
from nodes.agent.speaking import say

LONGEST_SECONDS = 20.0  # for NVML: a driver that sets GPUs up when it is opened takes a second for each
RATE_SECONDS = 1.0


def main(*, as_json: bool) -> int:
    """1 where NVML does not answer."""
    try:
        settings = read_settings(posts=False)
    except WrongSetting as error:
        say(str(error))
        return 1
    told = sample(settings)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads it may have read enough
    print(json.dumps(told, indent=2) if as_json else "\n".join(lines(told)))
    return 1 if told["silent"] else 0


def sample(settings: Settings) -> dict[str, Any]:
    """Facts, a look at every GPU, the host, and the processes on GPUs."""
    host, mounts = Host(), Mounts()
    probed = disks.probed(settings.mounts, host.proc)
    host.look()
    mounts.ask(probed)
    watch = GpuWatch(
        GpuReader(every=1.0, everything=True), Remembered(settings.state), Samples(1.0), lambda event: None
    )
    looks, counters = _listen(watch)
    mounts.look(time.time())
    processes = Processes()
    processes.tell(counters, watch.gpus)  # names of users are asked for beside
    kernel_log = KernelLog(settings.kmsg)
    kernel_log.open()
    problems = {"kernel_log": kernel_log.problem, "gpus": watch.absent.why if watch.absent else ""}
    told = {
        "facts": facts(
            node=settings.node, machine=watch.reader.machine, gpus=watch.known(), problems=problems, probed=probed
        ),
        "at": round(time.time(), 3),
        "silent": watch.absent is None and looks is None,
        "gpus": [_gpu(watch, looks, counters, place) for place in range(len(watch.gpus))],
        "host": {**host.look(), **mounts.values()},
        "processes": processes.tell(counters, watch.gpus),
    }
    watch.reader.close()
    mounts.close()
    return told


def _listen(watch: GpuWatch) -> tuple[GpuSamples | None, GpuCounters | None]:
    """The second look, for rates are known from then on, and the counters; nothing where NVML does not answer."""
    began = time.monotonic()
    seen: list[GpuSamples] = []
    while (now := time.monotonic()) - began < LONGEST_SECONDS:
        watch.tend()
        newest = watch.reader.newest
        if newest is not None and newest not in seen:
            seen.append(newest)
        is_enough = watch.absent is not None or (len(seen) > 1 and watch.counters is not None)
        if is_enough and now - began >= RATE_SECONDS:
            break
        file = watch.reader.fileno()
        select.select([] if file is None or watch.absent else [file], [], [], 0.1)
    return seen[-1] if seen else None, watch.counters


def _gpu(watch: GpuWatch, looks: GpuSamples | None, counters: GpuCounters | None, place: int) -> dict[str, Any]:
    look = looks.samples[place] if looks and place < len(looks.samples) else {}
    counted = counters.counters[place] if counters and place < len(counters.counters) else {}
    told = {"uuid": watch.gpus[place].uuid, "index": watch.gpus[place].index, "name": watch.gpus[place].name}
    return {**told, "lost": look is None, **(look or {}), "counters": dict(counted)}


def lines(told: dict[str, Any]) -> list[str]:
    """The same for people."""
    about, host = told["facts"], told["host"]
    found = [f"{about['host']}: {about['kernel']}, {about['cpus']} CPUs, {about['memory_mib'] / 1024:.0f} GiB"]
    if told["silent"]:
        found.append("NVML does not answer.")
    elif not told["gpus"]:
        found.append(f"No GPU is read here: {about['problems'].get('gpus') or 'NVML knows of none.'}")
    found += [_line_of_gpu(gpu) for gpu in told["gpus"]]
    if why := about["problems"].get("kernel_log"):
        found.append(f"The kernel log can't be read: {why}")
    found += [f"  {name:32} {_value(name, value)}" for name, value in sorted(host.items())]
    return found + [_line_of_process(process) for process in told["processes"]]


def _value(name: str, value: float | None) -> str:
    if value is None:
        return "hangs" if name.startswith("mount_ms:") else "not told"
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
