"""Report to Vigil from a training script: one file, the standard library only, any Python from 3.9.

    import vigil_report

    path = vigil_report.resume_path()                # where the last checkpoint lies, or None on a fresh start
    vigil_report.log(step, loss=0.31, accuracy=0.9)  # any numbers, any names; never waits for disk or network
    vigil_report.progress(step, total)               # the progress bar
    vigil_report.checkpoint("model.pt", step)        # a file or a folder, copied; rank 0's counts
    if vigil_report.stopping():                      # Vigil wants this attempt to end: save, leave with exit code 0
        ...

Outside a Vigil job every call does nothing. Reporting never raises into the script: what cannot be reported is said
once on stderr.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

SEGMENT_BYTES = 16 * 1024 * 1024
POINTS_A_BATCH = 5_000
PENDING_POINTS = 200_000  # what waits in memory while the disk is full or hangs; beyond, points are dropped and counted
PENDING_EVENTS = 2_000
EVENT_BYTES = 32 * 1024
CLOSE_SECONDS = 5.0
RETRY_SECONDS = 0.5
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,127}")

Points = dict[str, list[tuple[int, float]]]
Event = dict[str, Any]


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _plain(value: float) -> Any:
    """JSON knows no NaN and no infinities: they travel as strings."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _dump(thing: Any) -> str:
    return json.dumps(thing, separators=(",", ":"), allow_nan=False, default=str)


class Stream:
    """What one process says, appended to its own spool file by a thread of its own (PROTOCOLS §3).

    One writer for life, a random id, a header line, then a JSON line a batch with seq 0, 1, 2 …; segments of 16 MB.
    `log` and `event` only append to memory. The thread writes every `flush_seconds`, at once after a quiet spell, and
    at once for events, which it also fsyncs. A line that could not be written whole is written again at the same
    offset, so a full disk leaves no damage; what no longer fits in memory meanwhile is counted (`report.dropped`).
    """

    def __init__(
        self,
        attempt_dir: os.PathLike[str] | str,
        *,
        rank: int,
        incarnation: int,
        node: str = "",
        restart_count: int | None = None,
        flush_seconds: float = 1.0,
        flush_steps: int = 50,
    ) -> None:
        self.id = os.urandom(8).hex()
        self.path = Path(attempt_dir) / "spool" / f"{incarnation}.{rank}.{self.id}.jsonl"
        if restart_count is None:
            restart_count = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._header = {
            "stream": self.id,
            "version": 1,
            "incarnation": incarnation,
            "rank": rank,
            "node": node or os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "boot_id": boot_id(),
            "restart_count": restart_count,
            "time": time.time(),
        }
        self._flush_seconds, self._flush_steps = flush_seconds, flush_steps
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)  # the writer waits here for work
        self._wrote = threading.Condition(self._lock)  # flush and close wait here for the writer
        self._points: Points = {}
        self._events: list[Event] = []
        self._waiting = self._logged = self._dropped_points = self._dropped_calls = 0
        self._asked = self._done = 0  # flushes asked for, and the last one that is on disk
        self._last_write = 0.0
        self._urgent = self._closing = self._closed = False
        self._refused: set[str] = set()
        # Only the writer touches these.
        self._file = -1
        self._segment = self._offset = self._seq = 0
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="vigil-report", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # What a training loop calls: memory only.

    def log(self, step: int, **values: float) -> None:
        """Numbers of one step. They are on disk within `flush_seconds`."""
        with self._lock:
            if self._closing:
                return
            if self._waiting >= PENDING_POINTS:
                self._dropped_points += len(values)
                self._dropped_calls += 1
                return
            for name, value in values.items():
                self._append(name, step, value)
            self._logged += 1
            if self._logged >= self._flush_steps or time.monotonic() - self._last_write >= self._flush_seconds:
                self._hurry()

    def event(self, kind: str, **data: Any) -> None:
        """Something that happened: fsynced as soon as the writer gets to it, after everything logged before."""
        event = {"kind": kind, "time": time.time(), **data}
        try:
            if len(_dump(event)) > EVENT_BYTES:
                event = {"kind": kind, "time": event["time"], "truncated": True, **_short(data)}
        except (TypeError, ValueError):
            event = {"kind": kind, "time": event["time"], "text": repr(data)[:4096]}
        with self._lock:
            if self._closing:
                return
            if len(self._events) >= PENDING_EVENTS:
                self._dropped_calls += 1
                return
            self._events.append(event)
            self._hurry()

    def flush(self, wait: float = 0.0) -> bool:
        """Write now what was logged so far. With `wait`, return once it is fsynced (True) or `wait` seconds are over.

        Call with a wait just before a checkpoint is committed: a resume begins after it, so nothing would log these
        steps again if this process died with them in memory.
        """
        with self._lock:
            self._asked += 1
            mine = self._asked
            self._hurry()
            deadline = time.monotonic() + wait
            while self._done < mine and self._thread.is_alive():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._wrote.wait(left)
            return self._done >= mine

    def close(self) -> None:
        """The last batch and the end line. Waits five seconds at most; after it nothing is taken any more."""
        if os.getpid() != self._pid:
            return  # a forked child: the stream is its parent's
        with self._lock:
            self._closing = True
            self._hurry()
            deadline = time.monotonic() + CLOSE_SECONDS
            while not self._closed and self._thread.is_alive():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._wrote.wait(left)
        atexit.unregister(self.close)

    def _hurry(self) -> None:
        self._urgent = True
        self._wake.notify()

    def _append(self, name: str, step: int, value: float) -> None:
        try:
            step, value = int(step), float(value)
            if step < 0 or not NAME.fullmatch(name):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            if name not in self._refused and len(self._refused) < 100:
                self._refused.add(name)
                print(
                    f"vigil_report: {name} at step {step!r} is not a number under a plain name; skipped",
                    file=sys.stderr,
                )
            return
        self._points.setdefault(name, []).append((step, value))
        self._waiting += 1

    # The writer's thread.

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._urgent:
                    self._wake.wait(self._flush_seconds)
                self._urgent = False
                points, events, asked, last = self._points, self._events, self._asked, self._closing
                self._points, self._events, self._waiting, self._logged = {}, [], 0, 0
                dropped = {"batches": self._dropped_calls, "points": self._dropped_points}
                self._dropped_calls = self._dropped_points = 0
                self._last_write = time.monotonic()
            if dropped["batches"]:
                events.append({"kind": "report.dropped", "time": time.time(), **dropped})
            self._write(points, events)
            if last:
                self._line({"end": True, "seq": self._seq, "time": time.time()})
            if events or asked > self._done or last:
                self._sync()
            with self._lock:
                self._done, self._closed = asked, last
                self._wrote.notify_all()
            if last:
                if self._file >= 0:
                    os.close(self._file)
                return

    def _write(self, points: Points, events: list[Event]) -> None:
        """Lines of at most POINTS_A_BATCH points; events go with the last, after the points they followed."""
        chunk: dict[str, list[list[Any]]] = {}
        room = POINTS_A_BATCH
        for name, column in points.items():
            start = 0
            while start < len(column):
                taken = column[start : start + room]
                chunk[name] = [[step, _plain(value)] for step, value in taken]
                start, room = start + len(taken), room - len(taken)
                if not room:
                    self._batch(chunk, [])
                    chunk, room = {}, POINTS_A_BATCH
        while len(events) > 16:
            self._batch(chunk, events[:16])
            chunk, events = {}, events[16:]
        if chunk or events:
            self._batch(chunk, events)

    def _batch(self, series: dict[str, list[list[Any]]], events: list[Event]) -> None:
        self._line({"seq": self._seq, "time": time.time(), "series": series, "events": events})
        self._seq += 1

    def _line(self, thing: dict[str, Any]) -> None:
        """Append one line whole, however long the disk is full; while it is, the memory above fills and counts."""
        data = (_dump(thing) + "\n").encode()
        while True:
            try:
                if self._file < 0 or self._offset >= SEGMENT_BYTES:
                    self._next_segment()
                written = 0
                while written < len(data):
                    written += os.pwrite(self._file, data[written:], self._offset + written)
                self._offset += len(data)
                return
            except OSError:
                if self._closing:
                    return  # a torn last line ends the stream: readers ignore it
                time.sleep(RETRY_SECONDS)

    def _next_segment(self) -> None:
        """The next file of the stream, exclusively; the first begins with the header."""
        path = str(self.path) + (f".{self._segment}" if self._segment else "")
        if self._segment == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if self._file >= 0 else 0), 0o640)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._offset = file, 0
        self._segment += 1
        if self._segment == 1:
            data = (_dump(self._header) + "\n").encode()
            try:
                if os.pwrite(file, data, 0) != len(data):
                    raise OSError("short write")
            except OSError:
                os.close(file)
                self._file, self._segment = -1, 0
                raise
            self._offset = len(data)

    def _sync(self) -> None:
        try:
            if self._file >= 0:
                os.fsync(self._file)
        except OSError:
            pass


def _short(data: dict[str, Any]) -> dict[str, Any]:
    """The data of an event that was too long: every value cut, so that at least its beginning is kept."""
    return {
        name: value if isinstance(value, (int, float)) else str(value)[:1024] for name, value in list(data.items())[:16]
    }
