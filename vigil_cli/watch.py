"""Watching one job from a terminal: a bar that redraws on a tty, a line now and then elsewhere. No Django here."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from vigil_cli.portal import Portal, Trouble
from vigil_cli.terminal import plain
from vigil_core import formatting, kinds

LINE_EVERY_S = 10.0
PATIENCE_S = 300.0  # for a portal that is being restarted
NUMBERS = {"loss": "loss", "validation_loss": "val", "accuracy": "accuracy", "tokens_per_second": "tok/s"}


def words(job: dict[str, Any]) -> str:
    """Says in one line how far the job is: state, steps, newest values, time left."""
    parts = [formatting.word(job["state"])]
    done = job["progress"]
    if done["step"] is not None:
        of = f" / {done['steps']:,}" if done["steps"] else ""
        parts.append(f"{done['step']:,}{of} {kinds.of(job['kind']).many}")
    for name, label in NUMBERS.items():
        if (value := job["latest"].get(name)) is not None:
            parts.append(f"{label} {formatting.measured(name, value)}")
    if done["eta_seconds"] is not None and job["state"] == "running":
        parts.append(f"{formatting.duration(done['eta_seconds'])} left")
    elif job["reason"]:
        parts.append(job.get("explained") or job["reason"])  # a portal of before has but the reason
    return " · ".join(parts).replace(formatting.NBSP, " ")


def bar(fraction: float | None, width: int = 16) -> str:
    full = round((fraction or 0.0) * width)
    return "█" * full + "░" * (width - full)


@dataclass
class Screen:
    """Progress on stderr. On a tty one line is redrawn; elsewhere a line is written when it says something new."""

    out: TextIO = field(default_factory=lambda: sys.stderr)
    _last: str = ""
    _state: object = None
    _said_at: float = float("-inf")

    def show(self, job: dict[str, Any]) -> None:
        text = plain(words(job))
        if self.out.isatty():
            width = max(20, shutil.get_terminal_size().columns - 1)
            line = f"#{job['id']} {bar(job['progress']['fraction'])} {text}"
            if line != self._last:
                self.out.write(f"\r\x1b[2K{line[:width]}")
        else:
            state, now = (job["state"], job["attempt"] and job["attempt"]["number"]), time.monotonic()
            if text == self._last or (state == self._state and now - self._said_at < LINE_EVERY_S):
                return
            self._state, self._said_at, line = state, now, text
            self.out.write(f"#{job['id']} {text}\n")
        self._last = line
        self.out.flush()

    def end(self, job: dict[str, Any]) -> None:
        """The last word, unless it was just said."""
        text = plain(words(job))
        if self.out.isatty() or text != self._last:
            self.say(f"#{job['id']} {text}")

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.out.isatty() and self._last:
            self.out.write("\n")
            self._last = ""
        self.out.write(f"{plain(text)}\n")
        self.out.flush()


def follow(
    portal: Portal, job_id: int, *, changed: Callable[[dict[str, Any]], None], every_s: float = 0.7
) -> dict[str, Any]:
    """The job once it is over, telling every change on the way. A portal that restarts is waited for."""
    silent_since: float | None = None
    last: tuple[Any, ...] = ()
    while True:
        try:
            job: dict[str, Any] = portal.get(f"jobs/{job_id}")
        except Trouble as trouble:
            silent_since = silent_since or time.monotonic()
            if 0 < trouble.status < 500 or time.monotonic() - silent_since > PATIENCE_S:
                raise
            time.sleep(every_s)
            continue
        silent_since = None
        for heavy in ("spec", "spec_toml"):
            job.pop(heavy, None)
        now = (job["state"], job["reason"], job["progress"]["step"], job["latest"], job["attempt"]["number"])
        if now != last:
            changed(job)
            last = now
        if job["over"]:
            return job
        time.sleep(every_s)
