"""`check`: may jobs start on this node? For Slurm's Prolog and HealthCheckProgram, so it answers within 2 s.

What may hang is asked by processes that are not waited for. Exit 0 and a sentence: all is well; 1 and a sentence: not.
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
from nodes.agent.gpu_watch import GpuWatch
from nodes.agent.host import PROC, SYS
from nodes.agent.mounts import Mounts
from nodes.agent.remembered import FILE, Remembered
from nodes.agent.samples import Samples
from nodes.agent.settings import Settings, WrongSetting, read_settings

ANSWER_SECONDS = 1.9  # after which it says what it knows, if only that it took too long
NVML_SECONDS = 1.5
MOUNT_SECONDS = 1.0
EVERY_SECONDS = 0.2
MIB = 2**20
ROOT_MIB, SHM_PERCENT = 512, 10
MOST_BLOCKED = 16
NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")


def main() -> int:
    _answer_in_time()
    try:
        settings = read_settings(posts=False)
    except WrongSetting as error:
        print(str(error))
        return 1
    found, well = look(settings)
    print(" ".join(found) if found else well)
    return 1 if found else 0


def _answer_in_time() -> None:
    def too_late(number: int, frame: FrameType | None) -> None:
        os.write(1, b"This node did not answer its check in time.\n")
        os._exit(1)

    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, ANSWER_SECONDS)


def look(settings: Settings, *, proc_root: Path = PROC, sys: Path = SYS) -> tuple[list[str], str]:
    """What speaks against jobs here, a sentence each, and what to say where nothing does."""
    began = time.monotonic()
    mounts, blocked = Mounts(), proc.blocked(proc_root)
    mounts.ask(disks.probed(settings.mounts, proc_root))
    remembered = Remembered(settings.state)
    gpus = _Gpus(remembered, len(remembered.gpus) or pci_gpus(sys), settings.state)
    found = [*gpus.look(until=began + NVML_SECONDS)]
    while time.monotonic() - began < MOUNT_SECONDS and mounts.is_asking:
        time.sleep(0.01)
    found += [*_hung(mounts, proc_root, settings.mounts or ()), *_room("/", ROOT_MIB), *_shm()]
    found += _pile(blocked, proc.blocked(proc_root))
    mounts.close()
    return found, f"{settings.node} is well: {gpus.said}."


@dataclass
class _Gpus:
    """All that speaks against this node's GPUs."""

    remembered: Remembered
    expected: int
    state: Path
    said: str = "it has no GPU"

    def look(self, *, until: float) -> Iterator[str]:
        watch = GpuWatch(
            GpuReader(every=EVERY_SECONDS, everything=True), self.remembered, Samples(EVERY_SECONDS), lambda event: None
        )
        before = self.remembered.gpus
        looks, counters = _listen(watch, until)
        watch.reader.close()
        if watch.absent is not None and not self.expected:
            return
        if watch.absent is not None:
            yield f"NVML can't be opened: {watch.absent.why}."
        elif looks is None:
            yield f"NVML did not answer within {NVML_SECONDS:g} s."
        else:
            self.said = f"{len(watch.gpus)} GPUs answer"
            yield from self._missing(watch, before)
            yield from _sick(watch, looks, counters)

    def _missing(self, watch: GpuWatch, before: list[dict[str, object]]) -> Iterator[str]:
        there = {normalised(gpu.bus) for gpu in watch.gpus if gpu.bus}
        gone = [str(gpu["bus"]) for gpu in before if normalised(str(gpu["bus"])) not in there]
        if len(watch.gpus) < self.expected:
            named = f" ({', '.join(gone)} missing)" if gone else ""
            meant = f" If that is meant, remove {self.state / FILE}." if before else ""
            yield f"{len(watch.gpus)} of {self.expected} GPUs are there{named}.{meant}"


def _listen(watch: GpuWatch, until: float) -> tuple[GpuSamples | None, GpuCounters | None]:
    """The first look and the counters; None for what did not come in time."""
    while (left := until - time.monotonic()) > 0:
        watch.tend()
        if watch.absent is not None or (watch.reader.newest is not None and watch.counters is not None):
            break
        file = watch.reader.fileno()
        select.select([] if file is None else [file], [], [], min(left, 0.05))
    return watch.reader.newest, watch.counters


def _sick(watch: GpuWatch, looks: GpuSamples, counters: GpuCounters | None) -> Iterator[str]:
    for number, gpu in enumerate(watch.gpus):
        name = f"GPU {number if gpu.index is None else gpu.index}{f' ({gpu.bus})' if gpu.bus else ''}"
        counted = counters.counters[number] if counters and number < len(counters.counters) else {}
        if number < len(looks.samples) and looks.samples[number] is None:
            yield f"{name} is lost."
        elif broken := faults(counted):
            yield f"{name} {broken[0]}."


def pci_gpus(sys: Path) -> int:
    """NVIDIA's GPUs on the bus, by the kernel's own list; not those that were handed to virtual machines."""
    root = sys / "bus/pci/devices"
    found = [root / name for name in proc.names(root) if proc.read(root / name / "vendor", 16).strip() == NVIDIA]
    displays = [device for device in found if proc.read(device / "class", 16).startswith(DISPLAYS)]
    return sum(1 for device in displays if (device / "driver").resolve().name != "vfio-pci")


def _hung(mounts: Mounts, proc_root: Path, named: tuple[str, ...]) -> Iterator[str]:
    for path, problem in mounts.unwell():
        yield f"{label(path)} {problem}."
    mounted = {mount.path for mount in disks.mounts(proc_root)}
    for path in named:
        if path not in mounted and path not in dict(mounts.unwell()):
            yield f"Nothing is mounted at {label(path)}, which VIGIL_AGENT_MOUNTS names."


def _room(path: str, least_mib: int) -> Iterator[str]:
    there = os.statvfs(path)
    free = there.f_bavail * there.f_frsize / MIB
    if there.f_blocks and free < least_mib:
        yield f"{path} has {free:.0f} MiB left."


def _shm() -> Iterator[str]:
    """What jobs before have left in shared memory is missing to the next."""
    try:
        there = os.statvfs("/dev/shm")
    except OSError:
        return
    if there.f_blocks and 100 * there.f_bavail < SHM_PERCENT * there.f_blocks:
        yield f"/dev/shm has {there.f_bavail * there.f_frsize / MIB:.0f} MiB left: see what ended jobs left there."


def _pile(before: list[int], now: list[int]) -> Iterator[str]:
    """Processes that were stuck at the beginning and still are."""
    stuck = sorted(set(before) & set(now))
    if len(stuck) > MOST_BLOCKED:
        shown = ", ".join(map(str, stuck[:3]))
        yield f"{len(stuck)} processes wait for a disk, a file system or a driver and can't be ended ({shown}, …)."
