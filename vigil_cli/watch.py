"""Follow jobs, sweeps and tests to their end; show a job as a redrawn bar on a tty, else as lines. No Django here."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from vigil_cli.portal import CliError, Portal
from vigil_cli.terminal import plain
from vigil_core import formatting, kinds

Record = dict[str, Any]

LINE_EVERY_S = 10.0
PATIENCE_S = 900.0  # how long a portal is waited for that does not respond, as while it is upgraded
NUMBERS = {"loss": "loss", "validation_loss": "val", "accuracy": "accuracy", "tokens_per_second": "tok/s"}


def progress_text(job: dict[str, Any]) -> str:
    """Return the job's progress in one line: state, steps, newest values, time left."""
    parts = [formatting.word(job["state"])]
    done = job["progress"]
    if done["step"] is not None:
        of = f" / {done['steps']:,}" if done["steps"] else ""
        parts.append(f"{done['step']:,}{of} {kinds.by_name(job['kind']).units}")
    for name, label in NUMBERS.items():
        if (value := job["latest"].get(name)) is not None:
            parts.append(f"{label} {formatting.series_value(name, value)}")
    if done["eta_seconds"] is not None and job["state"] == "running":
        parts.append(f"{formatting.duration(done['eta_seconds'])} left")
    elif job["reason"]:
        parts.append(job.get("explained") or job["reason"])  # an older portal sends only the reason
    return formatting.plain_spaces(" · ".join(parts))


def bar(fraction: float | None, width: int = 16) -> str:
    full = round((fraction or 0.0) * width)
    return "█" * full + "░" * (width - full)


@dataclass
class Screen:
    """Show progress on stderr: on a tty one redrawn line, elsewhere a line when something changes."""

    out: TextIO = field(default_factory=lambda: sys.stderr)
    _last: str = ""
    _state: object = None
    _printed_at: float = float("-inf")

    def show(self, job: dict[str, Any]) -> None:
        text = plain(progress_text(job))
        if self.out.isatty():
            width = max(20, shutil.get_terminal_size().columns - 1)
            line = f"#{job['id']} {bar(job['progress']['fraction'])} {text}"
            if line != self._last:
                self.out.write(f"\r\x1b[2K{line[:width]}")
        else:
            state, now = (job["state"], job["attempt"] and job["attempt"]["number"]), time.monotonic()
            if text == self._last or (state == self._state and now - self._printed_at < LINE_EVERY_S):
                return
            self._state, self._printed_at, line = state, now, text
            self.out.write(f"#{job['id']} {text}\n")
        self._last = line
        self.out.flush()

    def end(self, job: dict[str, Any]) -> None:
        """Print the final state, unless it was just printed."""
        text = plain(progress_text(job))
        if self.out.isatty() or text != self._last:
            self.print_line(f"#{job['id']} {text}")

    def print_line(self, text: str) -> None:
        """Print a line that stays."""
        if self.out.isatty() and self._last:
            self.out.write("\n")
            self._last = ""
        self.out.write(f"{plain(text)}\n")
        self.out.flush()


def follow(portal: Portal, job_id: int, *, changed: Callable[[Record], None]) -> Record:
    """Poll the job until it is over and return it; call `changed` when what a terminal shows has changed."""

    def key(job: Record) -> object:
        return job["state"], job["reason"], job["progress"]["step"], job["latest"], job["attempt"]["number"]

    job = poll_until(portal, f"jobs/{job_id}", is_over=lambda job: bool(job["over"]), key=key, changed=changed)
    for heavy in ("spec", "spec_toml"):
        job.pop(heavy, None)
    return job


def poll_until(
    portal: Portal, path: str, *, is_over: Callable[[Record], bool], key: Callable[[Record], object],
    changed: Callable[[Record], None], every_s: float = 0.7,
) -> Record:  # fmt: skip
    """Poll a resource until it is over and return it; call `changed` whenever its `key` differs from the last one.

    Waits up to PATIENCE_S for a portal that does not respond. Raises CliError then, and if it rejects the request.
    """
    silent_since: float | None = None
    last: object = None
    while True:
        try:
            found: Record = portal.get(path)
        except CliError as error:
            silent_since = silent_since or time.monotonic()
            if 0 < error.status < 500 or time.monotonic() - silent_since > PATIENCE_S:
                raise
        else:
            silent_since = None
            if (now := key(found)) != last:
                changed(found)
                last = now
            if is_over(found):
                return found
        time.sleep(every_s)
