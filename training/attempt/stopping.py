"""How a run is asked to stop (protocols.md §2).

Under the launcher a rank ignores TERM and USR1, which reach it when a whole process group is signalled; the launcher
alone decides and leaves `stop-requested` in the attempt's folder. Standalone, the first Ctrl-C or TERM asks, the second
ends the process.
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
LOOK_SECONDS = 0.05


class StopRequest:
    """Whether this rank has been asked. Every step wants to know; the file system is asked twenty times a second."""

    def __init__(self) -> None:
        self._files: tuple[str, ...] = ()
        self._reason = ""
        self._look_at = 0.0

    def listen(self, *, launched: bool) -> None:
        """Call before torch is imported: a signal during the import must not kill the rank."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN if launched else self._on_signal)
        if not launched:
            signal.signal(signal.SIGINT, self._on_signal)

    def watch(self, attempt_dir: Path, incarnation: int = 0) -> None:
        """Look for the attempt's stop, and for this incarnation's, which another with more nodes shall follow."""
        self._files = (str(attempt_dir / REQUESTED), str(attempt_dir / f"{REGROUP}{incarnation}"))

    @property
    def asked(self) -> bool:
        if not self._reason and (now := time.monotonic()) >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            for file in self._files:
                if os.path.exists(file):
                    found = read_json(Path(file)) or {}
                    self._reason = str(found.get("reason") or "signal")
                    break
        return bool(self._reason)

    def why(self) -> str:
        """Return cancel, time_limit, signal or regroup, also where another rank was the first to see the request."""
        self._look_at = 0.0  # the request is there, even if this rank has looked for it within the last LOOK_SECONDS
        return self._reason if self.asked else "signal"

    def _on_signal(self, number: int, _frame: object) -> None:
        self._reason = "signal"
        signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True)
class Stopped:
    """What rank 0 leaves behind once the last checkpoint is committed."""

    step: int
    name: str
    generation: int
    reason: str

    def write(self, attempt_dir: Path) -> None:
        about = {"step": self.step, "name": self.name, "generation": self.generation, "reason": self.reason}
        write_json(attempt_dir / STOPPED, {**about, "time": time.time()}, durable=True)
