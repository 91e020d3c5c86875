"""How long shared file systems take to answer, each asked by a process that nobody waits for: it may hang for ever."""

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
AGAIN_SECONDS = 30.0  # one more is asked beside one that hangs: it may hang for a reason of its own
MOST_PROBES = 2
_PR_SET_PDEATHSIG = 1
Event = dict[str, Any]
_libc = ctypes.CDLL(None)


def ask(path: str) -> None:
    """A question that only the file system's server can answer."""
    os.statvfs(path)
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


class Probe:
    """One question to one mount."""

    def __init__(self, path: str, question: Callable[[str], None] = ask) -> None:
        self.began = time.monotonic()
        self.seconds: float | None = None
        """How long it took; None: it has not answered."""
        self.problem = ""
        self._pipe, writing = os.pipe()
        os.set_blocking(self._pipe, False)
        self.pid = os.fork()
        if self.pid == 0:
            _answer(writing, path, question)
        os.close(writing)
        self.is_over = False

    def look(self, now: float) -> None:
        """Take its answer, if there is one."""
        if not self.is_over:
            with suppress(ChildProcessError):
                self.is_over = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
            if self.is_over:
                self._take(now)

    def end(self) -> None:
        """Kill it, and wait for nothing."""
        if not self.is_over:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
            os.close(self._pipe)
            self.is_over = True

    def _take(self, now: float) -> None:
        with suppress(BlockingIOError):
            said = os.read(self._pipe, 200).decode(errors="replace").split(" ", 1)
            with suppress(ValueError):
                self.seconds, self.problem = float(said[0]), (said[1] if len(said) > 1 else "")
        if self.seconds is None:
            self.seconds, self.problem = now - self.began, "the probe died"
        os.close(self._pipe)


def _answer(writing: int, path: str, question: Callable[[str], None]) -> None:
    """In the child: nothing of the agent's stays open in it, no lock and no output that somebody reads to its end."""
    try:
        kept = os.dup2(writing, 0)
        os.closerange(1, 4_096)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        began = time.monotonic()
        problem = ""
        try:
            question(path)
        except OSError as error:
            problem = error.strerror or type(error).__name__
        os.write(kept, f"{time.monotonic() - began:.6f} {problem}".encode())
    finally:
        os._exit(0)


@dataclass
class Mount:
    """One shared file system, and how it answers."""

    path: str
    question: Callable[[str], None] = ask
    probes: list[Probe] = field(default_factory=list)
    seconds: float | None = None
    """How long the last answer took; None while it hangs, fails, or was not asked."""
    problem: str = ""
    """Why the last answer was an error."""
    slow_since: float | None = None
    is_judged: bool = False
    """Whether it has answered, or hangs."""

    def ask(self) -> None:
        now = time.monotonic()
        if not self.probes or (len(self.probes) < MOST_PROBES and now - self.probes[-1].began > AGAIN_SECONDS):
            with suppress(OSError):  # no process, no descriptor left
                self.probes.append(Probe(self.path, self.question))

    def look(self, wall: float) -> list[Event]:
        """Take answers in; events where it has become slow, or well again."""
        now = time.monotonic()
        events: list[Event] = []
        for probe in list(self.probes):
            probe.look(now)
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
            probe.end()

    def _hanging(self, now: float) -> int:
        return sum(1 for probe in self.probes if now - probe.began > SLOW_SECONDS)

    def _judge(self, is_slow: bool, since: float, wall: float, problem: str) -> list[Event]:
        self.is_judged = True
        if is_slow and self.slow_since is None:
            self.slow_since = since
            told = {"kind": "mount.slow", "at": round(wall, 3), "mount": label(self.path), "since": round(since, 3)}
            return [told | ({"problem": problem} if problem else {})]
        if not is_slow and self.slow_since is not None:
            since, self.slow_since = self.slow_since, None
            return [_well(label(self.path), since, wall)]
        return []


@dataclass
class Mounts:
    """All that are probed. `slow` are those that an agent before this one has told of, by label: since when."""

    question: Callable[[str], None] = ask
    slow: dict[str, float] = field(default_factory=dict)
    _mounts: dict[str, Mount] = field(default_factory=dict)

    def ask(self, paths: tuple[str, ...]) -> list[Event]:
        """Begin to ask each. Who is mounted no more is forgotten, and is slow no more."""
        for path in [path for path in self._mounts if path not in paths]:
            mount = self._mounts.pop(path)
            if mount.slow_since is not None:
                self.slow[label(path)] = mount.slow_since
            mount.close()
        for path in paths:
            if path not in self._mounts:
                self._mounts[path] = Mount(path, self.question, slow_since=self.slow.pop(label(path), None))
            self._mounts[path].ask()
        gone, self.slow = self.slow, {}
        return [_well(name, since, time.time()) | {"problem": "it is mounted no more"} for name, since in gone.items()]

    def look(self, wall: float) -> list[Event]:
        return [event for mount in self._mounts.values() for event in mount.look(wall)]

    @property
    def is_asking(self) -> bool:
        """Whether an answer may come any moment."""
        now = time.monotonic()
        return any(now - probe.began < SLOW_SECONDS for mount in self._mounts.values() for probe in mount.probes)

    def unwell(self) -> list[tuple[str, str]]:
        """Those that do not answer now, or not well, and in what words."""
        self.look(time.time())
        found = [(path, mount) for path, mount in self._mounts.items() if mount.probes or mount.problem]
        return [
            (path, f"can't be read: {mount.problem}" if mount.problem else "does not answer") for path, mount in found
        ]

    def values(self) -> dict[str, float | None]:
        told = {mount.path: mount.seconds for mount in self._mounts.values() if mount.is_judged}
        return {f"mount_ms:{label(path)}": _ms(seconds) for path, seconds in told.items()}

    def close(self) -> None:
        for mount in self._mounts.values():
            mount.close()


def _well(name: str, since: float, wall: float) -> Event:
    return {"kind": "mount.well", "at": round(wall, 3), "mount": name, "seconds": round(max(wall - since, 0.0), 1)}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 2)
