"""Report to Vigil from a training script: one file, the standard library only, any Python from 3.9.

    import vigil_report

    path = vigil_report.resume_path()                # the last checkpoint, or None on a fresh start
    vigil_report.log(step, loss=0.31, accuracy=0.9)  # any numbers, any names; never waits for disk or network
    vigil_report.progress(step, total)               # the progress bar
    vigil_report.checkpoint("model.pt", step)        # a file or a folder, copied; only rank 0's counts
    if vigil_report.stopping():                      # Vigil wants this attempt to end: save, leave with exit code 0
        ...
    vigil_report.finished()                          # all is done, even if a stop was requested meanwhile

Outside a Vigil job every call does nothing. Reporting never raises into the script: each problem is reported once on
stderr.
"""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SEGMENT_BYTES = 16 * 1024 * 1024
BATCH_POINTS = 5_000
PENDING_POINTS = 200_000  # held in memory while the disk is full or hangs; further points are dropped and counted
PENDING_EVENTS = 2_000
EVENT_BYTES = 32 * 1024
# A value that readers refuse would invalidate the whole line, with all its points.
LAST_STEP = 2**53 - 1
KIND_LENGTH = 64
DEPTH = 60
CLOSE_SECONDS = 5.0
RETRY_SECONDS = 0.5
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,127}")
FILE = re.compile(r"(?!COMMITTED$|VERIFIED$|DAMAGED$)[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC

Points = dict[str, list[tuple[int, float]]]
Event = dict[str, Any]


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _json_number(value: float) -> Any:
    """Return a number as JSON can represent it: NaN and infinities as strings."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)


class Stream:
    """The reports of one process, appended to a spool file of its own by a separate thread (protocols.md §3).

    One writer for its whole life, a random id, a header line, then one JSON line per batch with seq 0, 1, 2 …;
    segments of 16 MB. `log` and `event` only append to memory. The thread writes every `flush_seconds`, at once after
    a quiet period, and at once for events, which it also fsyncs. A line that could not be written completely is
    written again at the same offset, so a full disk causes no damage; what no longer fits in memory meanwhile is
    counted (`report.dropped`).
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
            restart_count = int(os.environ.get("VIGIL_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._header = {
            "stream": self.id,
            "version": 1,
            "incarnation": incarnation,
            "rank": rank,
            "node": node or os.environ.get("VIGIL_NODE") or os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "boot_id": boot_id(),
            "restart_count": restart_count,
            "time": time.time(),
        }
        self._flush_seconds, self._flush_steps = flush_seconds, flush_steps
        # Reentrant, as a signal handler may report, too, while its own thread is in here.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)  # the writer waits here for work
        self._wrote = threading.Condition(self._lock)  # flush and close wait here for the writer
        self._points: Points = {}
        self._events: list[Event] = []
        self._waiting = self._logged = self._dropped_points = self._dropped_calls = 0
        self._flushes_requested = self._flushes_done = 0  # flushes requested, and the last one that is on disk
        self._last_write = 0.0
        self._urgent = self._closing = self._closed = False
        self._retry_until = float("inf")  # when to stop retrying a line that failed
        self._refused: set[str] = set()
        # Only the writer touches these.
        self._file = -1
        self._is_on_nfs = False
        self._segment = self._offset = self._seq = 0
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="vigil-report", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # What a training loop calls: memory only.

    def log(self, step: int, **values: float) -> None:
        """Log numbers of one step. They are on disk within `flush_seconds`."""
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
                self._wake_writer()

    def event(self, kind: str, **data: Any) -> None:
        """Report an event: fsynced as soon as the writer gets to it, after everything logged before."""
        if "time" in data:
            data = {name: value for name, value in data.items() if name != "time"}
            self.refuse("event.time", "the time of an event is when it is reported; use another name; skipped")
        event = _event(kind, data)
        with self._lock:
            if self._closing:
                return
            if len(self._events) >= PENDING_EVENTS:
                self._dropped_calls += 1
                return
            self._events.append(event)
            self._wake_writer()

    def flush(self, wait: float = 0.0) -> bool:
        """Write everything logged so far. With `wait`, return when it is fsynced (True) or after `wait` seconds.

        Call with a wait just before a checkpoint is committed: a resume begins after it, so nothing would log these
        steps again if this process died with them in memory.
        """
        with self._lock:
            self._flushes_requested += 1
            request = self._flushes_requested
            self._wake_writer()
            deadline = time.monotonic() + wait
            while self._flushes_done < request and self._thread.is_alive():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._wrote.wait(left)
            return self._flushes_done >= request

    @property
    def is_owner(self) -> bool:
        """Return whether this process opened the stream: False in a forked child."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """Write the last batch and the end line. Waits at most five seconds; afterwards everything is ignored."""
        if not self.is_owner:
            return
        with self._lock:
            self._closing = True
            self._wake_writer()
            deadline = time.monotonic() + CLOSE_SECONDS
            self._retry_until = deadline - 2 * RETRY_SECONDS  # for that line only: shorter ones may still fit
            while not self._closed and self._thread.is_alive():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._wrote.wait(left)
        atexit.unregister(self.close)

    def _wake_writer(self) -> None:
        self._urgent = True
        self._wake.notify()

    def _append(self, name: str, step: int, value: float) -> None:
        try:
            step, value = int(step), float(value)
            if not 0 <= step <= LAST_STEP or (name not in self._points and not NAME.fullmatch(name)):
                raise ValueError
        except Exception:  # an object may raise anything when it is converted to a number
            self.refuse(name, f"{name} at step {_repr(step)} is not a number under a plain name; skipped")
            return
        self._points.setdefault(name, []).append((step, value))
        self._waiting += 1

    def refuse(self, name: str, reason: str) -> None:
        """Report once per name why it is not recorded."""
        if name not in self._refused and len(self._refused) < 100:
            self._refused.add(name)
            _warn(reason)

    # The writer's thread.

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._urgent:
                    self._wake.wait(self._flush_seconds)
                self._urgent = False
                points, events, requested, last = self._points, self._events, self._flushes_requested, self._closing
                self._points, self._events, self._waiting, self._logged = {}, [], 0, 0
                dropped = {"batches": self._dropped_calls, "points": self._dropped_points}
                self._dropped_calls = self._dropped_points = 0
                self._last_write = time.monotonic()
            if dropped["batches"]:
                events.append({"kind": "report.dropped", "time": time.time(), **dropped})
            self._write(points, events)
            if last:
                self._write_line({"end": True, "seq": self._seq, "time": time.time()})
            if events or requested > self._flushes_done or last or (points and self._is_on_nfs):
                self._sync()
            with self._lock:
                self._flushes_done, self._closed = requested, last
                self._wrote.notify_all()
            if last:
                if self._file >= 0:
                    os.close(self._file)
                return

    def _write(self, points: Points, events: list[Event]) -> None:
        """Write lines of at most BATCH_POINTS points; events go with the last one, after the points they followed."""
        chunk: dict[str, list[list[Any]]] = {}
        space = BATCH_POINTS
        for name, column in points.items():
            start = 0
            while start < len(column):
                part = column[start : start + space]
                chunk[name] = [[step, _json_number(value)] for step, value in part]
                start, space = start + len(part), space - len(part)
                if not space:
                    self._batch(chunk, [])
                    chunk, space = {}, BATCH_POINTS
        while len(events) > 16:
            self._batch(chunk, events[:16])
            chunk, events = {}, events[16:]
        if chunk or events:
            self._batch(chunk, events)

    def _batch(self, series: dict[str, list[list[Any]]], events: list[Event]) -> None:
        if self._write_line({"seq": self._seq, "time": time.time(), "series": series, "events": events}):
            self._seq += 1

    def _write_line(self, content: dict[str, Any]) -> bool:
        """Append one complete line, retrying while the disk is full; meanwhile reports accumulate in memory and are
        counted.

        Returns False once the stream gives up; an incomplete line is overwritten, and readers ignore the rest.
        """
        data = (_dump(content) + "\n").encode()
        while True:
            try:
                if self._file < 0 or self._offset >= SEGMENT_BYTES:
                    self._next_segment()
                written = 0
                while written < len(data):
                    written += os.pwrite(self._file, data[written:], self._offset + written)
                self._offset += len(data)
                return True
            except OSError:
                if time.monotonic() >= self._retry_until:
                    return False
                time.sleep(RETRY_SECONDS)

    def _next_segment(self) -> None:
        """Create the stream's next file, exclusively; the first begins with the header."""
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
            # On NFS other machines see data only once it is flushed, which may take half a minute.
            self._is_on_nfs = _filesystem(file).startswith("nfs")

    def _sync(self) -> None:
        try:
            if self._file >= 0:
                os.fsync(self._file)
        except OSError:
            pass


def _filesystem(file: int) -> str:
    """Return the type of the file system of an open file, such as ext4 or nfs4; "" if it is unknown."""
    device = os.fstat(file).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as mounts:
            matches = [line.partition(" - ")[2].split() for line in mounts if line.split()[2] == number]
    except (OSError, IndexError):
        return ""
    return matches[-1][0] if matches and matches[-1] else ""


def _warn(line: str) -> None:
    with suppress(
        OSError, ValueError, RuntimeError
    ):  # the log's disk is full, it is closed, or being written to just now
        print(f"vigil_report: {line}", file=sys.stderr, flush=True)


def _event(kind: str, data: dict[str, Any]) -> Event:
    """Return an event as of now, as its values may change before it is written."""
    header = {"kind": _kind(kind), "time": time.time()}
    try:
        text = _dump({**header, **data})
        if len(text) > EVENT_BYTES:
            text = _dump({**header, "truncated": True, **_shortened(data)})
        event: Event = json.loads(text)
        if _is_flat(event, DEPTH):
            return event
    except Exception:  # objects may raise anything when they are converted to text
        pass
    return {**header, "text": _repr(data)}


def _kind(kind: object) -> str:
    """Return the kind in the form that readers accept: one short line."""
    text = kind if isinstance(kind, str) else _repr(kind)
    return "".join(letter if letter >= " " else " " for letter in text[:KIND_LENGTH]).strip() or "event"


def _is_flat(value: Any, levels: int) -> bool:
    """Return whether lists and tables are nested at most `levels` deep."""
    if not isinstance(value, (list, dict)):
        return True
    return levels > 0 and all(
        _is_flat(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value)
    )


def _repr(value: object) -> str:
    try:
        return repr(value)[:4096]
    except Exception as error:
        return f"a {type(value).__name__} ({type(error).__name__})"


def _shortened(data: dict[str, Any]) -> dict[str, Any]:
    """Shorten the data of an event that is too long: every value is cut, so that its beginning remains."""
    return {
        name: value if isinstance(value, (int, float)) else str(value)[:1024] for name, value in list(data.items())[:16]
    }


# Functions for scripts.

_process_stream: Stream | None = None
_is_disabled = False
_progress: dict[str, Any] = {"stopping": False, "finished": False, "step": None, "steps": None}
_ancestors: list[list[int]] = []  # [step, generation] of every checkpoint that the next one descends from, in order


def log(step: int, **values: float) -> None:
    """Log numbers of one step, such as log(step, loss=0.3). Every rank may log; pages show rank 0 first."""
    if stream := _stream():
        stream.log(step, **values)


def progress(step: int, total: int) -> None:
    """Report how far the script is, for the progress bar and the remaining time."""
    if stream := _stream():
        try:
            _progress.update(step=int(step), steps=int(total))
            stream.event("progress", step=int(step), steps=int(total))
        except Exception:
            stream.refuse("progress", f"progress({_repr(step)}, {_repr(total)}) are not two numbers; skipped")


def event(kind: str, **data: Any) -> None:
    """Report an event for the job's history."""
    if stream := _stream():
        stream.event(kind, **data)


def stopping() -> bool:
    """Return whether Vigil wants this attempt to end: save with `checkpoint`, then leave with exit code 0.

    A script that calls this handles stops itself: SIGTERM no longer ends it (unless it has its own handler). Once it
    has received True, exit code 0 means that it is to resume later from what it has saved; a script that is done
    nevertheless calls `finished`, or has reported its last step with `progress`.

    With several ranks, call it on one and inform the others: they may learn of a stop at different steps.
    """
    if _stream() is None:
        return False
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not _is_stop_requested():
        return False
    if not _progress["stopping"]:
        _progress["stopping"] = True
        _write_progress()
    return True


def finished() -> None:
    """Report that all is done: exit code 0 then means that, even if the attempt was asked to stop."""
    if _stream() is not None:
        _progress["finished"] = True


def resume_path() -> Path | None:
    """Return the checkpoint that this start resumes from: the file or folder once given to `checkpoint`. None:
    fresh start.
    """
    name = os.environ.get("VIGIL_RESUME", "")
    if not name or _stream() is None:
        return None
    folder = _checkpoints() / name
    try:
        layout = json.loads((folder / "COMMITTED").read_text())["layout"]
        form, original_name = str(layout["form"]), os.path.basename(str(layout["name"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        _warn(f"{folder} is not a checkpoint of a script: {error!r}")
        return None
    if form != "archive":
        return folder / original_name if form == "file" else folder
    unpacked = _attempt() / "resume" / f"{os.environ['VIGIL_INCARNATION']}.{_rank()}" / original_name
    if not unpacked.exists():
        shutil.unpack_archive(folder / "folder.tar", unpacked)
    return unpacked


def checkpoint(path: str | os.PathLike[str], step: int, *, consumed_samples: int = 0) -> Path | None:
    """Copy a file or folder into the job's checkpoints, completely or not at all; return its location, or None on
    failure.

    The next start of this job finds it with `resume_path`. Only rank 0 commits; calls on other ranks do nothing, so
    call it when all ranks have written. The file must not change while it is copied.
    """
    stream = _stream()
    if stream is None or _rank() != 0:
        return None
    began = time.monotonic()
    stream.flush(wait=10)  # a resume begins after this step, so what was logged before it must not be lost
    try:
        return _commit(stream, Path(path), int(step), int(consumed_samples), began)
    except Exception as error:  # a full disk, a missing folder or an invalid number must not stop training
        _warn(f"no checkpoint at step {step}: {error}")
        stream.event("checkpoint.skipped", step=step, reason=str(error)[:500], failed=True)
        return None


def _stream() -> Stream | None:
    """Return this process's stream, opened by the first call; None outside a Vigil job and in a forked child."""
    global _process_stream, _is_disabled
    if _process_stream is None and not _is_disabled and "VIGIL_ATTEMPT_DIR" in os.environ:
        rank, incarnation = _rank(), int(os.environ.get("VIGIL_INCARNATION") or 0)
        try:
            _process_stream = Stream(_attempt(), rank=rank, incarnation=incarnation)
        except RuntimeError as error:  # the user has no thread left, or Python is shutting down
            _is_disabled = True
            _warn(f"nothing is reported: {error}")
            return None
        atexit.register(_write_progress)
        _ancestors[:] = _resumed_ancestors()
        if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:  # otherwise the script uses this signal itself
            _enable_stack_dumps(f"{incarnation}.{rank}.txt")
    return _process_stream if _process_stream is not None and _process_stream.is_owner else None


def _enable_stack_dumps(name: str) -> None:
    """Let Vigil request stacks when the script does not stop."""
    with suppress(OSError, ValueError):
        stacks = os.open(_attempt() / "stacks" / name, _APPEND, 0o640)
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)


def _is_stop_requested() -> bool:
    return os.path.exists(_attempt() / "stop-requested")  # unlike Path.exists, this never raises


def _write_progress() -> None:
    """Write for the launcher how far the script was: exit code 0 alone does not tell a stopped script from a
    finished one.
    """
    if _process_stream is None or not _process_stream.is_owner or not _is_stop_requested():
        return
    name = f"said-{os.environ.get('VIGIL_INCARNATION') or 0}.{_rank()}.json"
    with suppress(OSError):  # on a full disk, its exit code alone counts
        _write_durable(_attempt() / name, json.dumps(_progress).encode())


def _rank() -> int:
    """Return the rank as torchrun, Open MPI, MPICH or srun set it, in this order."""
    return _number_of("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", default=0)


def _world_size() -> int:
    return _number_of("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", default=1)


def _number_of(*names: str, default: int) -> int:
    """Return the first of these variables that is a number."""
    found = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in found if value.isascii() and value.isdigit()), default)


def _attempt() -> Path:
    return Path(os.environ["VIGIL_ATTEMPT_DIR"])


def _checkpoints() -> Path:
    return Path(os.environ["VIGIL_RUN_DIR"]) / "job" / "checkpoints"


def _generation() -> int:
    return int(os.environ.get("VIGIL_GENERATION") or 0)


def _resumed_ancestors() -> list[list[int]]:
    try:
        manifest = json.loads((_checkpoints() / os.environ["VIGIL_RESUME"] / "COMMITTED").read_text())
        return [
            [int(step), int(made)]
            for step, made in [*manifest["ancestors"], (manifest["step"], manifest["generation"])]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _check_fence() -> None:
    newest = int((Path(os.environ["VIGIL_RUN_DIR"]) / "job" / "GENERATION").read_text())
    if newest > _generation():
        raise ValueError(f"a newer launch of this job has taken over (generation {newest})")


def _commit(stream: Stream, path: Path, step: int, consumed_samples: int, began: float) -> Path:
    """Copy next to the target, write the manifest last, rename: as Vigil's own trainer does
    (training/checkpoint/saving.py).
    """
    generation, target = _generation(), _checkpoints() / f"step-{step}"
    if min(step, consumed_samples) < 0:
        raise ValueError("a step and samples are counted from 0 on")
    _check_fence()
    if _is_stop_requested() and [step, generation] in _ancestors[-1:]:  # it has just saved this step anyway
        _report_saved(stream, step, target)
        return target
    staging = target.with_name(f".step-{step}.{generation}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        form, files = _copy(path, staging)
        manifest = {
            "version": 1,
            "step": step,
            "generation": generation,
            "parent": _ancestors[-1] if _ancestors else None,
            "ancestors": _ancestors,
            "consumed_samples": consumed_samples,
            "world_size": _world_size(),
            "layout": {"form": form, "name": path.name},
            "config_hash": "",
            "config": {},
            "data": "",
            "state": {},
            "files": files,
            "created": time.time(),
            "seconds": time.monotonic() - began,
            "versions": {"python": sys.version.split()[0]},
        }
        _write_durable(staging / "COMMITTED", json.dumps(manifest).encode())
        _sync_folder(staging)
        _check_fence()
        _move_aside(target)
        os.rename(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _sync_folder(target.parent)
    parent = _ancestors[-1] if _ancestors else (None, None)
    _ancestors.append([step, generation])
    stream.event(
        "checkpoint.committed",
        step=step,
        name=target.name,
        generation=generation,
        parent_step=parent[0],
        parent_generation=parent[1],
        bytes=sum(int(file["bytes"]) for file in files),
        seconds=time.monotonic() - began,
        stall_seconds=time.monotonic() - began,
        consumed_samples=consumed_samples,
        world_size=manifest["world_size"],
    )
    if _is_stop_requested():
        _report_saved(stream, step, target)
    stream.flush(wait=5)
    return target


def _report_saved(stream: Stream, step: int, target: Path) -> None:
    """Report to the launcher that the checkpoint for the stop is committed."""
    with suppress(OSError):  # the disk may be full by now, but the checkpoint is committed
        _write_durable(_attempt() / "stopped.json", json.dumps({"step": step, "name": target.name}).encode())
    stream.event("stop.saved", step=step)


def _move_aside(target: Path) -> None:
    """Rename an existing checkpoint of this step, which belongs to another branch, to a name with its generation."""
    try:
        manifest = json.loads((target / "COMMITTED").read_text())
    except FileNotFoundError:
        return
    if manifest["generation"] == _generation():
        raise ValueError("this step has been committed since this start already")
    os.rename(target, target.with_name(f"{target.name}.g{manifest['generation']}"))


def _copy(path: Path, staging: Path) -> tuple[str, list[dict[str, Any]]]:
    """Copy the files, fsynced, with digests. A folder with subfolders or unusual names becomes one archive."""
    if path.is_file():
        if not FILE.fullmatch(path.name):
            raise ValueError(f"{path.name!r} is not a plain file name: letters, digits, dots, dashes, underscores")
        return "file", [_copy_file(path, staging / path.name)]
    entries = sorted(path.iterdir())
    if not entries:
        raise ValueError(f"{path} is empty")
    if all(entry.is_file() and FILE.fullmatch(entry.name) for entry in entries):
        return "folder", [_copy_file(entry, staging / entry.name) for entry in entries]
    return _archive(path, staging)


def _archive(path: Path, staging: Path) -> tuple[str, list[dict[str, Any]]]:
    archive = Path(shutil.make_archive(str(staging / "folder"), "tar", root_dir=path))
    return "archive", [_copy_file(archive, archive)]


def _copy_file(source: Path, target: Path) -> dict[str, Any]:
    """Copy one file (or only read it if it is there already); return its entry in the manifest."""
    digest, size = hashlib.sha256(), 0
    with open(source, "rb") as read, open(target, "r+b" if source == target else "xb") as written:
        while chunk := read.read(4 << 20):
            digest.update(chunk)
            size += len(chunk)
            if source != target:
                written.write(chunk)
        written.flush()
        os.fsync(written.fileno())
    return {"file": target.name, "bytes": size, "sha256": digest.hexdigest()}


def _write_durable(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
