"""Run one child process of `vigil up` in its own session; it dies with its parent and writes its own log file."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from portal.run.heartbeat import FILE, STACKS, Watch

BACK_OFF_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
# A child that ran this long was healthy: after its next death the shortest wait applies again.
WELL_AFTER_S = 30.0
LOG_LIMIT_BYTES = 32 * 1024 * 1024
# The time that a hung process has to write its stacks before it is killed.
STACKS_S = 1.0
# Lines that are also shown in the terminal; the rest stays in the log.
IMPORTANT = re.compile(r" (WARNING|ERROR|CRITICAL) |^[\w.]*(Error|Exception): ")
_PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent dies (Linux; elsewhere nothing happens)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # the parent died before the request
        os.kill(os.getpid(), number)


def lower_priority(niceness: int) -> None:
    """Lower this process's priority by `niceness`, also relative to other sessions."""
    os.nice(niceness)
    with suppress(OSError):  # no autogroups here; then a niceness counts only within the session
        Path("/proc/self/autogroup").write_text(str(niceness))


@dataclass
class Child:
    """A process to keep alive. It is ready once `ready` appears in its log (without it, once it runs)."""

    name: str
    command: Sequence[str]
    log: Path
    cwd: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    ready: re.Pattern[str] | None = None
    important: re.Pattern[str] | None = IMPORTANT
    pass_fds: Sequence[int] = ()
    niceness: int = 0
    watch: Watch | None = None  # checks its heartbeat; None: not monitored
    longest_wait_s: float = BACK_OFF_S[-1]  # maximum before it is started again, however often it dies
    process: subprocess.Popen[bytes] | None = None
    is_ready: bool = False
    deaths: int = 0
    started_at: float = 0.0
    start_again_at: float = 0.0
    _read_to: int = 0
    _size: int = 0
    _killed_at: float = 0.0  # when it was told to write its stacks; SIGKILL follows at the next check

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process. Call from the main thread only: the death signal follows the thread that forked."""
        parent = os.getpid()
        self._rotate()
        # A file and not a pipe: a child must not block or die because its reader is slow, stopped or gone.
        with self.log.open("ab") as output:
            self._read_to = output.tell()
            self.process = subprocess.Popen(
                list(self.command),
                cwd=self.cwd,
                env={**os.environ, **self.environment, FILE: str((self.watch and self.watch.path) or "")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(self.pass_fds),
                preexec_fn=lambda: self._prepare(parent),
            )
        self.started_at = time.monotonic()
        self._killed_at = 0.0
        if self.watch:
            self.watch.restart()
        self.is_ready = self.ready is None

    def _prepare(self, parent: int) -> None:
        die_with(parent)
        if self.niceness:
            lower_priority(self.niceness)

    def read_log(self) -> list[str]:
        """Return the important lines since the last check; sets `is_ready` when the ready line appears."""
        lines = self._new_lines()
        if self.ready and not self.is_ready:
            self.is_ready = any(self.ready.search(line) for line in lines)
        return [line for line in lines if self.important and self.important.search(line)]

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of its log, to report why it died."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 16_384))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def note_death(self) -> float:
        """Count one death; return the seconds until it may start again."""
        lived = time.monotonic() - self.started_at
        self.deaths = 1 if lived > WELL_AFTER_S else self.deaths + 1
        wait = min(BACK_OFF_S[min(self.deaths, len(BACK_OFF_S)) - 1], self.longest_wait_s)
        self.start_again_at = time.monotonic() + wait
        return wait

    def how_it_ended(self) -> str:
        code = self.process.poll() if self.process else None
        if code is None:
            return "is running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def send(self, number: int) -> None:
        """Send a signal to the process alone, so that it can stop its own children in order."""
        if self.is_running:
            assert self.process
            self.process.send_signal(number)

    def end_if_hung(self) -> bool:
        """Start killing it if it has no heartbeat, its stacks written first; return whether that has just begun.

        Nobody waits for its end: a process that hangs in a file system dies when the file system responds again.
        """
        if self.process is None or self.watch is None:
            return False
        if self._killed_at:
            if time.monotonic() - self._killed_at > STACKS_S:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            return False
        if not self.watch.is_over():
            return False
        self._killed_at = time.monotonic()
        if self.watch.path is not None:  # Redis does not handle that signal
            self.send(STACKS)
        return True

    def kill(self) -> None:
        """Send SIGKILL to its session's first process group, and reap it."""
        if self.process is None:
            return
        if self.process.poll() is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.process.kill()
        self.process.wait()

    def _new_lines(self) -> list[str]:
        try:
            self._size = self.log.stat().st_size
            if self._size <= self._read_to:
                return []
            with self.log.open("rb") as file:
                file.seek(self._read_to)
                data = file.read(1024 * 1024)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1] if len(data) < 1024 * 1024 else data
        self._read_to += len(whole)
        return whole.decode(errors="replace").splitlines()

    def _rotate(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > LOG_LIMIT_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))

    def shorten_log(self) -> None:
        """Set the log aside if it was long at the last check, while its writer continues in the emptied file."""
        if self._size > LOG_LIMIT_BYTES and self.log.exists():
            shutil.copyfile(self.log, self.log.with_suffix(".log.1"))
            os.truncate(self.log, 0)
            self._read_to = self._size = 0


def stop(children: Sequence[Child], patience_s: float) -> list[str]:
    """Send SIGTERM to all, then SIGKILL to those still running after `patience_s`; return the names of the killed."""
    for child in children:
        child.send(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while any(child.is_running for child in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    killed = [child.name for child in children if child.is_running]
    for child in children:
        child.kill()
    return killed
