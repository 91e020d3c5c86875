"""Plant faults for a game day of the portal, below the code that must notice them (docs/how-to/game-day.md).

Only where the node's operator set VIGIL_AGENT_GAMEDAY=yes and nobody uses the node, one at a time, for at most
MAX_SECONDS. Nothing breaks:

    xid     a line in the kernel log, which the agent reads back and which says that it is planted
    nvml    the process that reads NVML is stopped, as one whose driver call does not return
    mount   probes of one mount wait for some seconds before they read

Events that follow from a planted fault have its number as `planted`, and `planted_until`: what lasts longer is real.
"""

from __future__ import annotations

import os
import queue
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nodes.agent.disks import label
from nodes.agent.gpus.processes import is_running_jobs
from nodes.agent.gpus.watch import GpuWatch
from nodes.agent.kernel_log.reader import KernelLog
from nodes.agent.log import log
from nodes.agent.mounts import read_path
from nodes.agent.reporting.posting import PlantRequest

SETTING = "VIGIL_AGENT_GAMEDAY"
MAX_SECONDS = 300.0
PROBE_DELAY_S = 5.0
AFTERMATH_S = 60.0  # in which the end of a planted fault is still reported
_MARKED = {"nvml": ("gpu.silent", "gpu.answers"), "mount": ("mount.slow", "mount.well")}
Event = dict[str, Any]


class CannotPlant(Exception):
    """Raised if a fault cannot be planted on this node; the message says why."""


@dataclass(frozen=True)
class PlantedFault:
    """A planted fault. `mark`: what the line in the kernel log contains; `mount`: the slow one."""

    request: PlantRequest
    until: float
    """Unix time."""
    ends_at: float
    """The same by the monotonic clock."""
    mark: str = ""
    mount: str = ""

    def caused(self, event: Event) -> bool:
        """Return whether this event follows from the fault."""
        if self.mark:
            return event["kind"] == "xid" and self.mark in event["text"]
        is_of_kind = event["kind"] in _MARKED.get(self.request.fault, ())
        return is_of_kind and event.get("mount", "") == (label(self.mount) if self.mount else "")


@dataclass
class PlantedFaults:
    """Begins and ends planted faults. `requests` is filled by the sending thread; all else is the main thread's."""

    is_allowed: bool
    proc: Path = Path("/proc")
    requests: queue.SimpleQueue[PlantRequest] = field(default_factory=queue.SimpleQueue)
    _newest: PlantedFault | None = None
    _is_lasting: bool = False
    _last_id: int = 0

    def probe(self, path: str) -> None:
        """Probe a mount, late if it is the slow one. Runs in a child, with the state that was there when it began."""
        if self._is_lasting and self._newest is not None and path == self._newest.mount:
            time.sleep(PROBE_DELAY_S)
        read_path(path)

    def advance(self, kernel_log: KernelLog, gpus: GpuWatch, mounts: Callable[[], tuple[str, ...]]) -> list[Event]:
        """End the fault whose time is over, begin a requested one, and stop new processes that read NVML."""
        if self._is_lasting and self._newest is not None and time.monotonic() >= self._newest.ends_at:
            self.end(gpus)
        events = []
        with suppress(queue.Empty):
            while True:
                events += self._answer(self.requests.get_nowait(), kernel_log, gpus, mounts)
        if self._is_lasting and self._newest is not None and self._newest.request.fault == "nvml":
            _send_signal(gpus, signal.SIGSTOP)
        return events

    def end(self, gpus: GpuWatch) -> None:
        if self._is_lasting and self._newest is not None and self._newest.request.fault == "nvml":
            _send_signal(gpus, signal.SIGCONT)
        self._is_lasting = False

    def marked(self, events: Iterable[Event]) -> list[Event]:
        """Return the events, those that follow from the newest planted fault with its number."""
        newest = self._newest
        if newest is None or time.monotonic() > newest.ends_at + AFTERMATH_S:
            return list(events)
        mark = {"planted": newest.request.id, "planted_until": round(newest.until, 3)}
        return [event | mark if newest.caused(event) else event for event in events]

    def _answer(
        self, request: PlantRequest, kernel_log: KernelLog, gpus: GpuWatch, mounts: Callable[[], tuple[str, ...]]
    ) -> list[Event]:
        """Plant what is requested; return an event that says so, or why not. A repeated request has been answered.

        Numbers need not grow: a portal that was restored from a backup gives lower ones.
        """
        if request.id == self._last_id:
            return []
        self._last_id = request.id
        event: Event = {"at": round(time.time(), 3), "planted": request.id, "fault": request.fault}
        try:
            text = self._plant(request, kernel_log, gpus, mounts)
        except CannotPlant as error:
            return [event | {"kind": "fault.refused", "text": str(error)}]
        assert self._newest is not None
        log(f"A game day of the portal injected a fault for {self._newest.request.seconds:.0f} s: {text}")
        return [event | {"kind": "fault.planted", "text": text, "planted_until": round(self._newest.until, 3)}]

    def _plant(
        self, request: PlantRequest, kernel_log: KernelLog, gpus: GpuWatch, mounts: Callable[[], tuple[str, ...]]
    ) -> str:
        if not self.is_allowed:
            raise CannotPlant(f"{SETTING} is not yes on this node.")
        if self._is_lasting:
            raise CannotPlant("Another injected fault has not ended yet.")
        if _is_in_use(self.proc, gpus):
            raise CannotPlant("A job or another program uses this node.")
        seconds = min(request.seconds, MAX_SECONDS)
        fault = PlantedFault(request, time.time() + seconds, time.monotonic() + seconds)
        if request.fault == "xid":
            return self._write_xid(fault, kernel_log, gpus)
        if request.fault == "nvml":
            return self._hang_nvml(fault, gpus)
        if request.fault == "mount":
            return self._slow_mount(fault, mounts())
        raise CannotPlant("This agent does not know this fault: it is older than the portal.")

    def _write_xid(self, fault: PlantedFault, kernel_log: KernelLog, gpus: GpuWatch) -> str:
        bus = next((gpu.bus for gpu in gpus.gpus if gpu.bus), "")
        if not bus:
            raise CannotPlant("This node has no GPU.")
        # Nobody else can write a line with this word, so nothing but this line counts as planted.
        mark = f"Injected by Vigil's game day ({secrets.token_hex(8)})"
        line = f"NVRM: Xid (PCI:{bus}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus. {mark}"
        try:
            kernel_log.write(line)
        except OSError as error:
            raise CannotPlant(f"{kernel_log.path} cannot be written: {error.strerror}.") from None
        self._begin(fault, mark=mark)
        return f"Xid 79 of {bus} in {kernel_log.path}."

    def _hang_nvml(self, fault: PlantedFault, gpus: GpuWatch) -> str:
        if not gpus.gpus or gpus.is_silent:
            raise CannotPlant("NVML does not respond." if gpus.is_silent else "This node has no GPU.")
        self._begin(fault)
        return "The process that reads NVML is stopped."

    def _slow_mount(self, fault: PlantedFault, mounts: tuple[str, ...]) -> str:
        if not mounts:
            raise CannotPlant("This node's agent times no shared mount (VIGIL_AGENT_MOUNTS).")
        self._begin(fault, mount=mounts[0])
        return f"{label(mounts[0])} responds after {PROBE_DELAY_S:.0f} s."

    def _begin(self, fault: PlantedFault, *, mark: str = "", mount: str = "") -> None:
        self._newest = replace(fault, mark=mark, mount=mount)
        self._is_lasting = not mark  # a line in the log is written, and that is all


def _is_in_use(proc: Path, gpus: GpuWatch) -> bool:
    """Return whether a job runs here: the portal knows of its start only after the scheduler's next poll."""
    counters = gpus.newest_counters
    return (counters is not None and any(counters.processes or ())) or is_running_jobs(proc)


def _send_signal(gpus: GpuWatch, number: signal.Signals) -> None:
    """Stop or continue the processes that read NVML; the agent's watchdog is above them."""
    for pid in gpus.reader.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
