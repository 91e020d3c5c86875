"""Run tests in child processes: a device that hangs, or a driver that crashes, must not end the burn-in.

A child announces each test before it begins (`{"begin": "memory", "item": "GPU 3"}`) and prints each result. One that
prints nothing for SILENT_S (before its first line: START_S), or ends badly, is killed, and the test that it had
announced has failed.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from training.burnin.results import FAILED, MAX_LINE, result

START_S = 300.0  # for a process to start: importing torch from a busy file system may take minutes
SILENT_S = 180.0
START = "start"
KILL_WAIT_S = 10.0
STDERR_BYTES = 2_000
Line = dict[str, Any]


class TestProcess:
    """Follows one child: what it printed, and the test that it is in."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], item: str) -> None:
        self.item, self.test = item, START
        self.pending, self.errors = b"", b""
        self.heard_at = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "training.burnin.worker", *arguments], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip

    def lines(self, data: bytes) -> list[Line]:
        """Return the results in what it printed; an announcement changes the test that it is in."""
        self.heard_at = time.monotonic()
        *complete, self.pending = (self.pending + data).split(b"\n")
        self.pending = self.pending[-MAX_LINE:]
        found = []
        for text in complete:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and "begin" in line:
                self.test, self.item = str(line["begin"]), str(line.get("item", self.item))
            elif isinstance(line, dict) and "test" in line:
                found.append(line)
        return found

    @property
    def longest_silence_s(self) -> float:
        return START_S if self.test == START else SILENT_S

    def failure(self, why: str) -> Line:
        return result(self.test, self.item, outcome=FAILED, detail=why)

    def kill(self) -> None:
        """Kill the child with everything it started; a process that hangs in the driver is left behind."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            print(f"{self.item}: a process cannot be killed.", file=sys.stderr)


def run_children(children: Sequence[TestProcess], write: Callable[[Line], None], *, limit_s: float) -> None:
    """Follow children until all have ended, for `limit_s` at most; write their results, and why one failed."""
    until = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for child in children:
            for stream in (child.process.stdout, child.process.stderr):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, child)
        try:
            _follow(selector, list(children), write, until, limit_s)
        finally:
            for child in children:
                if child.process.poll() is None:
                    child.kill()
                for stream in (child.process.stdout, child.process.stderr):
                    if stream is not None:
                        stream.close()


def _follow(
    selector: selectors.BaseSelector,
    running: list[TestProcess],
    write: Callable[[Line], None],
    until: float,
    limit_s: float,
) -> None:
    while running:
        for key, _ in selector.select(timeout=0.5):
            _read(selector, key, write)
        for child in list(running):
            now = time.monotonic()
            if child.process.poll() is not None and not _is_open(selector, child):
                running.remove(child)
                if child.process.returncode:
                    write(child.failure(_why_ended(child)))
            elif now > until or now - child.heard_at > child.longest_silence_s:
                running.remove(child)
                child.kill()
                _close(selector, child)
                silent = now - child.heard_at
                write(child.failure(f"did not finish within {min(limit_s, silent):.0f} s and was stopped"))


def _read(selector: selectors.BaseSelector, key: selectors.SelectorKey, write: Callable[[Line], None]) -> None:
    child: TestProcess = key.data
    data = os.read(key.fd, 65_536)
    if not data:
        selector.unregister(key.fileobj)
    elif key.fileobj is child.process.stdout:
        for line in child.lines(data):
            write(line)
    else:
        child.errors = (child.errors + data)[-STDERR_BYTES:]


def _is_open(selector: selectors.BaseSelector, child: TestProcess) -> bool:
    return any(key.data is child for key in selector.get_map().values())


def _close(selector: selectors.BaseSelector, child: TestProcess) -> None:
    for key in [key for key in selector.get_map().values() if key.data is child]:
        selector.unregister(key.fileobj)


def _why_ended(child: TestProcess) -> str:
    code = child.process.returncode
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    lines = [line for line in child.errors.decode(errors="replace").splitlines() if line.strip()]
    return f"{how}: {lines[-1].strip()}" if lines else how
