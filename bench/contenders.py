"""Run processes that are measured in turn: each does as many rounds as requested, and reports what they took."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench import stage

PATIENCE = 900.0
"""Seconds for one turn at most."""


class Silent(Exception):
    """Raised when a contender has ended, or takes too long."""


@dataclass(frozen=True)
class ContenderTurn:
    """A turn of one contender: a number of rounds."""

    seconds: list[float]
    cpu_seconds: float
    """CPU seconds of all its processes, per round."""
    loss: float
    accuracy: float
    lost: Sequence[str]
    """Why clients gave no answer, so far."""


class Contender:
    """A process that does rounds on request (bench.federated_rivals.Turns)."""

    def __init__(self, child: subprocess.Popen[str], log: Path) -> None:
        self._child, self._log = child, log
        self._read_report()

    def turn(self, rounds: int) -> ContenderTurn:
        assert self._child.stdin
        before = stage.cpu_seconds(self._child.pid)
        self._child.stdin.write(f"{rounds}\n")
        self._child.stdin.flush()
        report = self._read_report()
        cpu = stage.cpu_seconds(self._child.pid) - before
        accuracy = report.get("accuracy", float("nan"))
        return ContenderTurn(report["seconds"], cpu / rounds, report["loss"], accuracy, report.get("lost", []))

    def _read_report(self) -> dict[str, Any]:
        assert self._child.stdout
        limit = threading.Timer(PATIENCE, self._child.kill)
        limit.start()
        try:
            for line in self._child.stdout:
                if line.startswith("@"):
                    report: dict[str, Any] = json.loads(line[1:])
                    return report
        finally:
            limit.cancel()
        raise Silent(" ".join(self._log.read_text(errors="replace").split())[-300:])


@contextmanager
def contending(command: Sequence[object], folder: Path, environment: Mapping[str, str]) -> Iterator[Contender]:
    """Run a contender; it and everything that it started end with the block."""
    log = folder / f"contender-{len(list(folder.iterdir()))}.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [str(word) for word in command],
            cwd=stage.REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(stage.REPOSITORY), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    assert child.stdin
    try:
        yield Contender(child, log)
    finally:
        family = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
        child.stdin.close()
        try:
            child.communicate(timeout=30)
        except (subprocess.TimeoutExpired, ValueError):
            child.kill()
            child.wait()
        for process in family:
            if process.is_running():
                process.kill()
