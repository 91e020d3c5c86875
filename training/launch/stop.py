"""Being asked to stop: TERM and USR1 to the launcher become the file `stop-requested` for everybody (protocols.md §2).

Under srun only USR1 gets here (srun answers TERM by killing its tasks): which signal it was, batch.sh writes down.
All of it is asked in the loop that watches the ranks: a file system that errs just now, where Path.exists would raise,
is asked again at the next look.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from training.attempt.files import read_json, write_json

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Remembers what arrived since the launcher began. A handler only notes; the loop acts."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def install(self) -> None:
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def is_asked(self) -> bool:
        return self.asked is not None

    def clear_wake(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self.wake, 64):
                pass

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is None:
            self.asked = signal.Signals(number)


class Stop:
    """Whether this attempt is to stop, said by any of its launchers; and for how long already."""

    def __init__(self, attempt_dir: Path, run_dir: Path, told: Path) -> None:
        """`told`: what batch.sh and the launchers tell each other in."""
        self._requested = attempt_dir / "stop-requested"
        self._asked = told / "asked"
        self._stopped = attempt_dir / "stopped.json"
        self._cancelled = run_dir / "portal" / "cancelled"
        self.reason = ""
        self._since = 0.0

    def look(self, asked: signal.Signals | None) -> bool:
        """True once: when it has just become known."""
        if self.reason:
            return False
        if (word := self._word(asked)) is not None:
            with suppress(OSError):  # said again at the next look
                self._request(word)
        found: Any = read_json(self._requested)
        if found is None:
            return False
        self.reason, self._since = str(found.get("reason", "signal")), time.monotonic()
        return True

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since if self.reason else 0.0

    @property
    def saved(self) -> bool:
        """A rank has said that the stop's checkpoint is committed."""
        return os.path.exists(self._stopped)

    def _word(self, asked: signal.Signals | None) -> str | None:
        """The signal's name: the batch script's word for it, else our own."""
        with suppress(OSError, ValueError):
            return f"SIG{self._asked.read_text().strip()}"
        if asked is None and os.path.exists(self._cancelled):  # the batch script, which gets the signal, may be lost
            return signal.SIGUSR1.name
        return asked.name if asked is not None else None

    def _request(self, word: str) -> None:
        reason = "cancel" if os.path.exists(self._cancelled) else "time_limit" if word == "SIGUSR1" else "signal"
        if not os.path.exists(self._requested):
            write_json(self._requested, {"reason": reason, "time": time.time()}, durable=True)


class Regroup:
    """An incarnation that ends at a step boundary so that more nodes can take part: stopping, but to be started again.

    Its ranks look for `regroup-<incarnation>` as they do for `stop-requested` (training.attempt.stopping).
    """

    def __init__(self, attempt_dir: Path) -> None:
        self._folder = attempt_dir
        self._stopped = attempt_dir / "stopped.json"

    def ask(self, number: int) -> None:
        with suppress(OSError):  # asked again at the next look
            write_json(self._folder / f"regroup-{number}", {"reason": "regroup", "time": time.time()}, durable=True)

    def was_asked(self, number: int) -> bool:
        return os.path.exists(self._folder / f"regroup-{number}")

    def finish(self, number: int) -> None:
        """The ranks' word that they have saved is not one about the attempt's stop."""
        with suppress(OSError):
            os.replace(self._stopped, self._folder / f"regrouped-{number}.json")
