"""Runs stages of the proof side by side: each lane one stage after the other, the lanes at the same time.

    python -m tests.lanes check,test-quick,test-ranks test-portal,test-slurm

A stage is a target of the Makefile. Its output goes to var/lanes/<stage>.log and is printed when the stage is done.
At the end come the last lines of stages that failed, the durations of folders and stages, and all tests in one line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.seconds import RESULTS_FOLDER, Seconds

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "var" / "lanes"
TAIL_LINES = 60
COUNTED = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed|rerun|deselected|warnings?)\b")
LAST_LINE = re.compile(r"^=*\s*\d+ \w+.* in [\d.]+s( \([\d:]+\))?\s*=*$", re.MULTILINE)


@dataclass(frozen=True)
class Stage:
    """A stage that has run."""

    name: str
    code: int
    began: float
    seconds: float
    cpu: float  # seconds, with those of its child processes; a stage with little of it mostly waits
    log: Path

    def __str__(self) -> str:
        outcome = "" if self.code == 0 else f", exit code {self.code}"
        return f"{self.name}: {self.seconds:.0f} s{outcome}"

    @property
    def outputs(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def tail(self) -> str:
        return "\n".join(self.outputs.splitlines()[-TAIL_LINES:])

    @property
    def last_lines(self) -> list[str]:
        """Return the last line of each pytest of this stage."""
        return [found[0].strip("= \n") for found in LAST_LINE.finditer(self.outputs)]


class Proof:
    """Runs every lane in a separate thread; a lane continues after a failed stage, as its other results are useful."""

    def __init__(self, lanes: Sequence[Sequence[str]], logs: Path = LOGS, tables: Path = RESULTS_FOLDER) -> None:
        self.lanes, self.logs, self.tables = lanes, logs, tables
        self.done: list[Stage] = []
        self._began = time.monotonic()
        self._printing = threading.Lock()

    def run(self) -> int:
        for folder in (self.logs, self.tables):
            folder.mkdir(parents=True, exist_ok=True)
        threads = [threading.Thread(target=self._take, args=(lane,)) for lane in self.lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("\n".join(self._summary()), flush=True)
        return 1 if self._failed else 0

    @property
    def _failed(self) -> list[Stage]:
        return [stage for stage in self.done if stage.code]

    def _take(self, lane: Sequence[str]) -> None:
        for name in lane:
            stage = self._run(name)
            with self._printing:
                self.done.append(stage)
                print(f"\n== {stage}\n{stage.outputs.rstrip()}", flush=True)

    def _run(self, name: str) -> Stage:
        print(f"-- {name} …", flush=True)
        log, began = self.logs / f"{name}.log", time.monotonic()
        self._table(name).unlink(missing_ok=True)
        with log.open("wb") as file:
            command = [os.environ.get("MAKE", "make"), "--no-print-directory", name]
            stage = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=_environment()
            )
            _, status, used = os.wait4(stage.pid, 0)  # Popen.wait does not return its CPU time
            stage.returncode = code = os.waitstatus_to_exitcode(status)
        cpu = used.ru_utime + used.ru_stime
        return Stage(name, code, began - self._began, time.monotonic() - began, cpu, log)

    def _table(self, name: str) -> Path:
        """Return the path of the durations that a stage's tests store (TEST_STAGE in the Makefile)."""
        return self.tables / f"{name}.tsv"

    def _folders(self) -> Seconds:
        """Return the durations of all stages, by folder."""
        every = Seconds()
        for table in (self._table(stage.name) for stage in self.done):
            if table.exists():
                every.read(table.read_text())
        return every.by_folder()

    def _summary(self) -> Iterable[str]:
        for stage in self._failed:
            yield f"\n== {stage}; its end, all of it in {stage.log}\n{stage.tail}"
        if (folders := self._folders()).seconds:
            yield "\n== seconds by folder, of all stages"
            yield from folders.lines(folders.by_cost())
        wall = time.monotonic() - self._began
        yield "\n== seconds by stage"
        for stage in sorted(self.done, key=lambda stage: -stage.seconds):
            summary = "; ".join(stage.last_lines) or ("ok" if stage.code == 0 else f"exit code {stage.code}")
            times = f"{stage.seconds:8.0f} s from {stage.began:5.0f} s, {stage.cpu:5.0f} s of CPU"
            yield f"{times}  {stage.name:<14} {summary}"
        yield total(stage.outputs for stage in self.done) + f" in {wall:.2f}s ({_clock(wall)})"


def total(outputs: Iterable[str]) -> str:
    """Return the totals of these outputs, in pytest's words."""
    counted: Counter[str] = Counter()
    for text in outputs:
        for line in LAST_LINE.finditer(text):
            counted.update({word.rstrip("s"): int(number) for number, word in COUNTED.findall(line[0])})
    words = ["failed", "passed", "skipped", "xfailed", "xpassed", "error", "rerun"]
    return ", ".join(f"{counted[word]} {word}" for word in words if counted[word]) or "no tests ran"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


def _environment() -> dict[str, str]:
    """Return the environment without the variables that make passes on: each stage is a separate make."""
    return {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}


if __name__ == "__main__":
    sys.exit(Proof([lane.split(",") for lane in sys.argv[1:]]).run())
