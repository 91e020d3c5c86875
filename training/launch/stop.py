"""Turn SIGTERM and SIGUSR1 to a launcher into the file `stop-requested` for all launchers and ranks (protocols.md §2).

Under srun only SIGUSR1 gets here (srun answers SIGTERM by killing its tasks), so batch.sh writes down which signal it
was. All of this is polled in the loop that watches the ranks; where Path.exists would raise because the file system
has an error just now, the next poll tries again.
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
    """Remembers the first signal since the launcher began. The handler only records; the loop acts."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.wake, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def install(self) -> None:
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def has_received(self) -> bool:
        return self.received is not None

    def clear_wake(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self.wake, 64):
                pass

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)


class AttemptStop:
    """Detects that a launcher of this attempt was asked to stop: why, and how long ago."""

    def __init__(self, attempt_dir: Path, run_dir: Path, exchange_dir: Path) -> None:
        """`exchange_dir`: the folder in which batch.sh and the launchers exchange files (LaunchPlan.exchange_dir)."""
        self._request_file = attempt_dir / "stop-requested"
        self._signal_file = exchange_dir / "asked"
        self._saved_file = attempt_dir / "stopped.json"
        self._cancel_file = run_dir / "portal" / "cancelled"
        self.reason = ""
        self._noticed_at = 0.0

    def poll(self, received: signal.Signals | None) -> bool:
        """Return True once: when a stop request has just been noticed."""
        if self.reason:
            return False
        if (name := self._signal_name(received)) is not None:
            with suppress(OSError):  # written again at the next poll
                self._request(name)
        request: Any = read_json(self._request_file)
        if request is None:
            return False
        self.reason, self._noticed_at = str(request.get("reason", "signal")), time.monotonic()
        return True

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._noticed_at if self.reason else 0.0

    @property
    def is_saved(self) -> bool:
        """Whether a rank has reported that the checkpoint of this stop is committed."""
        return os.path.exists(self._saved_file)

    def _signal_name(self, received: signal.Signals | None) -> str | None:
        """Return the signal's name: as the batch script noted it, else the one received here."""
        with suppress(OSError, ValueError):
            return f"SIG{self._signal_file.read_text().strip()}"
        if received is None and os.path.exists(
            self._cancel_file
        ):  # the batch script, which gets the signal, may have died
            return signal.SIGUSR1.name
        return received.name if received is not None else None

    def _request(self, name: str) -> None:
        reason = "cancel" if os.path.exists(self._cancel_file) else "time_limit" if name == "SIGUSR1" else "signal"
        if not os.path.exists(self._request_file):
            write_json(self._request_file, {"reason": reason, "time": time.time()}, durable=True)


class Regroup:
    """Ends an incarnation at a step boundary so that more nodes can take part: it stops, to be started again.

    Its ranks watch for `regroup-<incarnation>` as they do for `stop-requested` (training.attempt.stopping).
    """

    def __init__(self, attempt_dir: Path) -> None:
        self._folder = attempt_dir
        self._saved_file = attempt_dir / "stopped.json"

    def request(self, number: int) -> None:
        with suppress(OSError):  # requested again at the next poll
            write_json(self._folder / f"regroup-{number}", {"reason": "regroup", "time": time.time()}, durable=True)

    def is_requested(self, number: int) -> bool:
        return os.path.exists(self._folder / f"regroup-{number}")

    def finish(self, number: int) -> None:
        """Rename the ranks' report that they have saved.

        Otherwise it would be mistaken for one about the attempt's stop.
        """
        with suppress(OSError):
            os.replace(self._saved_file, self._folder / f"regrouped-{number}.json")
