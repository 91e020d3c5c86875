"""Detect stop requests in a rank (protocols.md §2).

Under the launcher a rank ignores SIGTERM and SIGUSR1, which reach it when a whole process group is signalled; only the
launcher decides, and writes `stop-requested` to the attempt's folder. Standalone, the first Ctrl-C or SIGTERM requests
the stop, the second ends the process.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from training.attempt.files import read_json, write_json

REQUESTED, STOPPED = "stop-requested", "stopped.json"
REGROUP = "regroup-"
POLL_SECONDS = 0.05


class StopRequest:
    """Detects that this rank was asked to stop.

    Checked at every step, but the file system is polled only 20 times per second.
    """

    def __init__(self) -> None:
        self._files: tuple[str, ...] = ()
        self._reason = ""
        self._poll_at = 0.0

    def listen(self, *, launched: bool) -> None:
        """Install the signal handlers.

        Call before torch is imported: a signal during the import must not kill the rank.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN if launched else self._on_signal)
        if not launched:
            signal.signal(signal.SIGINT, self._on_signal)

    def watch(self, attempt_dir: Path, incarnation: int = 0) -> None:
        """Watch for the attempt's stop, and for this incarnation's (a regroup, followed by one with more nodes)."""
        self._files = (str(attempt_dir / REQUESTED), str(attempt_dir / f"{REGROUP}{incarnation}"))

    @property
    def is_requested(self) -> bool:
        if not self._reason and (now := time.monotonic()) >= self._poll_at:
            self._poll_at = now + POLL_SECONDS
            for file in self._files:
                if os.path.exists(file):
                    request = read_json(Path(file)) or {}
                    self._reason = str(request.get("reason") or "signal")
                    break
        return bool(self._reason)

    def reason(self) -> str:
        """Return cancel, time_limit, signal or regroup, even if another rank noticed the request first."""
        self._poll_at = 0.0  # the request exists, even if this rank has polled for it within the last POLL_SECONDS
        return self._reason if self.is_requested else "signal"

    def _on_signal(self, number: int, _frame: object) -> None:
        self._reason = "signal"
        signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True)
class StopReport:
    """The file that rank 0 leaves once the last checkpoint is committed."""

    step: int
    name: str
    generation: int
    reason: str

    def write(self, attempt_dir: Path) -> None:
        content = {"step": self.step, "name": self.name, "generation": self.generation, "reason": self.reason}
        write_json(attempt_dir / STOPPED, {**content, "time": time.time()}, durable=True)
