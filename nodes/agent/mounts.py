"""Time how long shared file systems take to respond. Each probe is a process that is not waited for: it may hang."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nodes.agent.disks import label

SLOW_SECONDS = 2.0
RETRY_SECONDS = 30.0  # until a second probe is started next to a hanging one, which may hang for another reason
MAX_PROBES = 2
_PR_SET_PDEATHSIG = 1
Event = dict[str, Any]
_libc = ctypes.CDLL(None)


def read_path(path: str) -> None:
    """Read a path in a way that only the file system's server can answer."""
    os.statvfs(path)
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


class MountProbe:
    """A process that probes one mount."""

    def __init__(self, path: str, probe: Callable[[str], None] = read_path) -> None:
        self.began = time.monotonic()
        self.seconds: float | None = None
        """How long it took; None: no response yet."""
        self.problem = ""
        self._pipe, writing = os.pipe()
        os.set_blocking(self._pipe, False)
        self.pid = os.fork()
        if self.pid == 0:
            _run_probe(writing, path, probe)
        os.close(writing)
        self.is_over = False

    def poll(self, now: float) -> None:
        """Collect the result, if there is one."""
        if not self.is_over:
            with suppress(ChildProcessError):
                self.is_over = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
            if self.is_over:
                self._read_result(now)

    def kill(self) -> None:
        """Kill it without waiting."""
        if not self.is_over:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
            os.close(self._pipe)
            self.is_over = True

    def _read_result(self, now: float) -> None:
        with suppress(BlockingIOError):
            words = os.read(self._pipe, 200).decode(errors="replace").split(" ", 1)
            with suppress(ValueError):
                self.seconds, self.problem = float(words[0]), (words[1] if len(words) > 1 else "")
        if self.seconds is None:
            self.seconds, self.problem = now - self.began, "the check of this mount ended unexpectedly"
        os.close(self._pipe)


def _run_probe(writing: int, path: str, probe: Callable[[str], None]) -> None:
    """Run in the child: close all of the agent's descriptors, so that no lock and no output pipe stays open."""
    try:
        output = os.dup2(writing, 0)
        os.closerange(1, 4_096)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        began = time.monotonic()
        problem = ""
        try:
            probe(path)
        except OSError as error:
            problem = error.strerror or type(error).__name__
        os.write(output, f"{time.monotonic() - began:.6f} {problem}".encode())
    finally:
        os._exit(0)


@dataclass
class ProbedMount:
    """A shared file system and its response times."""

    path: str
    probe: Callable[[str], None] = read_path
    probes: list[MountProbe] = field(default_factory=list)
    seconds: float | None = None
    """How long the last response took; None while it hangs, fails, or was not probed."""
    problem: str = ""
    """Why the last response was an error."""
    slow_since: float | None = None
    is_judged: bool = False
    """Whether it has responded, or hangs."""

    def start_probe(self) -> None:
        now = time.monotonic()
        if not self.probes or (len(self.probes) < MAX_PROBES and now - self.probes[-1].began > RETRY_SECONDS):
            with suppress(OSError):  # out of processes or descriptors
                self.probes.append(MountProbe(self.path, self.probe))

    def poll(self, wall: float) -> list[Event]:
        """Collect results; return events if it has become slow, or fast again."""
        now = time.monotonic()
        events: list[Event] = []
        for probe in list(self.probes):
            probe.poll(now)
            if probe.is_over:
                self.probes.remove(probe)
                seconds = probe.seconds or 0.0
                self.seconds, self.problem = None if probe.problem else seconds, probe.problem
                is_slow = bool(probe.problem) or seconds > SLOW_SECONDS
                events += self._judge(is_slow, wall - (now - probe.began), wall, probe.problem)
        if self.probes and len(self.probes) == self._hanging(now):
            self.seconds = None
            events += self._judge(True, wall - (now - self.probes[0].began), wall, "")
        return events

    def close(self) -> None:
        for probe in self.probes:
            probe.kill()

    def _hanging(self, now: float) -> int:
        return sum(1 for probe in self.probes if now - probe.began > SLOW_SECONDS)

    def _judge(self, is_slow: bool, since: float, wall: float, problem: str) -> list[Event]:
        self.is_judged = True
        if is_slow and self.slow_since is None:
            self.slow_since = since
            event = {"kind": "mount.slow", "at": round(wall, 3), "mount": label(self.path), "since": round(since, 3)}
            return [event | ({"problem": problem} if problem else {})]
        if not is_slow and self.slow_since is not None:
            since, self.slow_since = self.slow_since, None
            return [_recovered(label(self.path), since, wall)]
        return []


@dataclass
class MountProbes:
    """All probed mounts. `slow`: mounts that a previous agent reported as slow, by label, and since when."""

    probe: Callable[[str], None] = read_path
    slow: dict[str, float] = field(default_factory=dict)
    _mounts: dict[str, ProbedMount] = field(default_factory=dict)

    def start_probes(self, paths: tuple[str, ...]) -> list[Event]:
        """Start a probe per mount. Mounts that are gone are dropped, and reported as no longer slow."""
        for path in [path for path in self._mounts if path not in paths]:
            mount = self._mounts.pop(path)
            if mount.slow_since is not None:
                self.slow[label(path)] = mount.slow_since
            mount.close()
        for path in paths:
            if path not in self._mounts:
                self._mounts[path] = ProbedMount(path, self.probe, slow_since=self.slow.pop(label(path), None))
            self._mounts[path].start_probe()
        gone, self.slow = self.slow, {}
        return [_recovered(name, since, time.time()) | {"problem": "no longer mounted"} for name, since in gone.items()]

    def poll(self, wall: float) -> list[Event]:
        return [event for mount in self._mounts.values() for event in mount.poll(wall)]

    @property
    def is_waiting(self) -> bool:
        """Return whether a response may arrive any moment."""
        now = time.monotonic()
        return any(now - probe.began < SLOW_SECONDS for mount in self._mounts.values() for probe in mount.probes)

    def failing(self) -> list[tuple[str, str]]:
        """Return the mounts that fail or do not respond now, each with a description."""
        self.poll(time.time())
        found = [(path, mount) for path, mount in self._mounts.items() if mount.probes or mount.problem]
        return [
            (path, f"cannot be read: {mount.problem}" if mount.problem else "does not respond") for path, mount in found
        ]

    def values(self) -> dict[str, float | None]:
        seconds_by_path = {mount.path: mount.seconds for mount in self._mounts.values() if mount.is_judged}
        return {f"mount_ms:{label(path)}": _ms(seconds) for path, seconds in seconds_by_path.items()}

    def close(self) -> None:
        for mount in self._mounts.values():
            mount.close()


def _recovered(name: str, since: float, wall: float) -> Event:
    return {"kind": "mount.well", "at": round(wall, 3), "mount": name, "seconds": round(max(wall - since, 0.0), 1)}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 2)
