"""Implement `check`: may jobs start on this node? For Slurm's Prolog and HealthCheckProgram, so it takes at most 2 s.

Whatever may hang is probed by processes that are not waited for. Exit 0: healthy; 1: not. Both print one sentence.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from gpus.health import faults
from gpus.pci import normalised
from gpus.reader import GpuReader
from gpus.reports import GpuCounters, GpuSamples
from nodes.agent import disks, proc
from nodes.agent.disks import label
from nodes.agent.gpus.history import FILE, GpuHistory
from nodes.agent.gpus.samples import SampleWindow
from nodes.agent.gpus.watch import GpuWatch
from nodes.agent.host import PROC, SYS
from nodes.agent.mounts import MountProbes
from nodes.agent.settings import AgentSettings, InvalidSetting, read_settings

ANSWER_SECONDS = 1.9  # after which it reports that the check took too long
NVML_SECONDS = 1.5
MOUNT_SECONDS = 1.0
EVERY_SECONDS = 0.2
MIB = 2**20
ROOT_MIB, SHM_PERCENT = 512, 10
MAX_BLOCKED = 16
NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")


def main() -> int:
    _set_deadline()
    try:
        settings = read_settings(posts=False)
    except InvalidSetting as error:
        print(str(error))
        return 1
    found, healthy = check_node(settings)
    print(" ".join(found) if found else healthy)
    return 1 if found else 0


def _set_deadline() -> None:
    def too_late(number: int, frame: FrameType | None) -> None:
        os.write(1, b"This node's check did not finish in time.\n")
        os._exit(1)

    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, ANSWER_SECONDS)


def check_node(settings: AgentSettings, *, proc_root: Path = PROC, sys: Path = SYS) -> tuple[list[str], str]:
    """Return what speaks against jobs here, one sentence each, and the sentence to print if nothing does."""
    started = time.monotonic()
    mounts, blocked = MountProbes(), proc.blocked(proc_root)
    mounts.start_probes(disks.probed(settings.mounts, proc_root))
    remembered = GpuHistory(settings.state)
    gpus = _GpuCheck(remembered, len(remembered.gpus) or pci_gpus(sys), settings.state)
    found = [*gpus.problems(until=started + NVML_SECONDS)]
    while time.monotonic() - started < MOUNT_SECONDS and mounts.is_waiting:
        time.sleep(0.01)
    found += [*_mount_problems(mounts, proc_root, settings.mounts or ()), *_low_space("/", ROOT_MIB), *_shm()]
    found += _blocked_processes(blocked, proc.blocked(proc_root))
    mounts.close()
    return found, f"{settings.node} is healthy: {gpus.summary}."


@dataclass
class _GpuCheck:
    """Check this node's GPUs against those it had before."""

    remembered: GpuHistory
    expected: int
    state: Path
    summary: str = "no GPU"

    def problems(self, *, until: float) -> Iterator[str]:
        watch = GpuWatch(
            GpuReader(every=EVERY_SECONDS, detailed=True),
            self.remembered,
            SampleWindow(EVERY_SECONDS),
            lambda event: None,
        )
        previous = self.remembered.gpus
        samples, counters = _read_gpus(watch, until)
        watch.reader.close()
        if watch.absent is not None and not self.expected:
            return
        if watch.absent is not None:
            yield f"NVML cannot be opened: {watch.absent.why}."
        elif samples is None:
            yield f"NVML did not respond within {NVML_SECONDS:g} s."
        else:
            self.summary = f"{len(watch.gpus)} GPUs respond"
            yield from self._missing(watch, previous)
            yield from _gpu_problems(watch, samples, counters)

    def _missing(self, watch: GpuWatch, previous: list[dict[str, object]]) -> Iterator[str]:
        present = {normalised(gpu.bus) for gpu in watch.gpus if gpu.bus}
        missing = [str(gpu["bus"]) for gpu in previous if normalised(str(gpu["bus"])) not in present]
        if len(watch.gpus) < self.expected:
            named = f" ({', '.join(missing)} missing)" if missing else ""
            hint = f" If this is intended, delete {self.state / FILE}." if previous else ""
            yield f"{len(watch.gpus)} of {self.expected} GPUs are present{named}.{hint}"


def _read_gpus(watch: GpuWatch, until: float) -> tuple[GpuSamples | None, GpuCounters | None]:
    """Return the first sample and the counters; None for what did not arrive in time."""
    while (remaining := until - time.monotonic()) > 0:
        watch.poll()
        if watch.absent is not None or (watch.reader.newest is not None and watch.counters is not None):
            break
        file = watch.reader.fileno()
        select.select([] if file is None else [file], [], [], min(remaining, 0.05))
    return watch.reader.newest, watch.counters


def _gpu_problems(watch: GpuWatch, samples: GpuSamples, counters: GpuCounters | None) -> Iterator[str]:
    for number, gpu in enumerate(watch.gpus):
        name = f"GPU {number if gpu.index is None else gpu.index}{f' ({gpu.bus})' if gpu.bus else ''}"
        counted = counters.counters[number] if counters and number < len(counters.counters) else {}
        if number < len(samples.samples) and samples.samples[number] is None:
            yield f"{name} is lost."
        elif broken := faults(counted):
            yield f"{name} {broken[0]}."


def pci_gpus(sys: Path) -> int:
    """Count NVIDIA GPUs on the PCI bus by the kernel's list, without those passed through to virtual machines."""
    root = sys / "bus/pci/devices"
    devices = [root / name for name in proc.names(root) if proc.read(root / name / "vendor", 16).strip() == NVIDIA]
    displays = [device for device in devices if proc.read(device / "class", 16).startswith(DISPLAYS)]
    return sum(1 for device in displays if (device / "driver").resolve().name != "vfio-pci")


def _mount_problems(mounts: MountProbes, proc_root: Path, named: tuple[str, ...]) -> Iterator[str]:
    for path, problem in mounts.failing():
        yield f"{label(path)} {problem}."
    mounted = {mount.path for mount in disks.mounts(proc_root)}
    for path in named:
        if path not in mounted and path not in dict(mounts.failing()):
            yield f"{label(path)} is listed in VIGIL_AGENT_MOUNTS but not mounted."


def _low_space(path: str, least_mib: int) -> Iterator[str]:
    stats = os.statvfs(path)
    free = stats.f_bavail * stats.f_frsize / MIB
    if stats.f_blocks and free < least_mib:
        yield f"{path} has {free:.0f} MiB left."


def _shm() -> Iterator[str]:
    """Report shared memory that ended jobs left full: the next job lacks it."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError:
        return
    if stats.f_blocks and 100 * stats.f_bavail < SHM_PERCENT * stats.f_blocks:
        yield f"/dev/shm has {stats.f_bavail * stats.f_frsize / MIB:.0f} MiB left. Delete what ended jobs left there."


def _blocked_processes(before: list[int], now: list[int]) -> Iterator[str]:
    """Report processes that were blocked at the start of the check and still are."""
    stuck = sorted(set(before) & set(now))
    if len(stuck) > MAX_BLOCKED:
        shown = ", ".join(map(str, stuck[:3]))
        yield f"{len(stuck)} processes are blocked on a disk, file system or driver and cannot be killed ({shown}, …)."
