"""Report to Vigil from a training script: one file, the standard library only, any Python from 3.9.

    import vigil_report

    path = vigil_report.resume_path()                # where the last checkpoint lies, or None on a fresh start
    vigil_report.log(step, loss=0.31, accuracy=0.9)  # any numbers, any names; never waits for disk or network
    vigil_report.progress(step, total)               # the progress bar
    vigil_report.checkpoint("model.pt", step)        # a file or a folder, copied; rank 0's counts
    if vigil_report.stopping():                      # Vigil wants this attempt to end: save, leave with exit code 0
        ...
    vigil_report.finished()                          # all is done, whatever was asked meanwhile

Outside a Vigil job every call does nothing. Reporting never raises into the script: what cannot be reported is said
once on stderr.
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
POINTS_A_BATCH = 5_000
PENDING_POINTS = 200_000  # what waits in memory while the disk is full or hangs; beyond, points are dropped and counted
PENDING_EVENTS = 2_000
EVENT_BYTES = 32 * 1024
# What a reader does not take costs the whole line, with all points in it.
LAST_STEP = 2**53 - 1
KIND_LETTERS = 64
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
    """What one process says, appended to its own spool file by a thread of its own (protocols.md §3).

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
        # A handler of a signal may report, too, and it may run while its own thread is in here.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)  # the writer waits here for work
        self._wrote = threading.Condition(self._lock)  # flush and close wait here for the writer
        self._points: Points = {}
        self._events: list[Event] = []
        self._waiting = self._logged = self._dropped_points = self._dropped_calls = 0
        self._asked = self._done = 0  # flushes asked for, and the last one that is on disk
        self._last_write = 0.0
        self._urgent = self._closing = self._closed = False
        self._gives_up = float("inf")  # when to write no line again that failed
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
        if "time" in data:
            data = {name: value for name, value in data.items() if name != "time"}
            self.refuse("event.time", "an event's time is when it is told: call what you say otherwise; left out")
        event = _event(kind, data)
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

    @property
    def mine(self) -> bool:
        """False in a forked child: the stream is its parent's."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """The last batch and the end line. Waits five seconds at most; after it nothing is taken any more."""
        if not self.mine:
            return
        with self._lock:
            self._closing = True
            self._hurry()
            deadline = time.monotonic() + CLOSE_SECONDS
            self._gives_up = deadline - 2 * RETRY_SECONDS  # on that line: others may have room
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
            if not 0 <= step <= LAST_STEP or (name not in self._points and not NAME.fullmatch(name)):
                raise ValueError
        except Exception:  # whatever somebody's object says when it is asked for a number
            self.refuse(name, f"{name} at step {_repr(step)} is not a number under a plain name; skipped")
            return
        self._points.setdefault(name, []).append((step, value))
        self._waiting += 1

    def refuse(self, name: str, why: str) -> None:
        """Say once of a name why nothing of it is reported."""
        if name not in self._refused and len(self._refused) < 100:
            self._refused.add(name)
            _say(why)

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
            if events or asked > self._done or last or (points and self._is_on_nfs):
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
        if self._line({"seq": self._seq, "time": time.time(), "series": series, "events": events}):
            self._seq += 1

    def _line(self, thing: dict[str, Any]) -> bool:
        """Append one line whole, however long the disk is full; while it is, the memory above fills and counts.

        False once the stream gives up; what was written of the line is written over, and readers ignore what is left.
        """
        data = (_dump(thing) + "\n").encode()
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
                if time.monotonic() >= self._gives_up:
                    return False
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
            # There other machines see what is written only once it is flushed, which may take half a minute.
            self._is_on_nfs = _filesystem(file).startswith("nfs")

    def _sync(self) -> None:
        try:
            if self._file >= 0:
                os.fsync(self._file)
        except OSError:
            pass


def _filesystem(file: int) -> str:
    """The type of file system that an open file lies on, such as ext4 or nfs4; "" where that cannot be told."""
    device = os.fstat(file).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as mounts:
            found = [line.partition(" - ")[2].split() for line in mounts if line.split()[2] == number]
    except (OSError, IndexError):
        return ""
    return found[-1][0] if found and found[-1] else ""


def _say(line: str) -> None:
    with suppress(OSError, ValueError, RuntimeError):  # a log on a full disk, or closed, or being written to just now
        print(f"vigil_report: {line}", file=sys.stderr, flush=True)


def _event(kind: str, data: dict[str, Any]) -> Event:
    """An event as it is now: what it holds may be changed before it is written."""
    about = {"kind": _kind(kind), "time": time.time()}
    try:
        text = _dump({**about, **data})
        if len(text) > EVENT_BYTES:
            text = _dump({**about, "truncated": True, **_short(data)})
        event: Event = json.loads(text)
        if _is_flat(event, DEPTH):
            return event
    except Exception:  # whatever somebody's objects say when they are asked for a text
        pass
    return {**about, "text": _repr(data)}


def _kind(kind: object) -> str:
    """As readers take it: one short line."""
    said = kind if isinstance(kind, str) else _repr(kind)
    return "".join(letter if letter >= " " else " " for letter in said[:KIND_LETTERS]).strip() or "event"


def _is_flat(value: Any, room: int) -> bool:
    """Whether lists and tables lie at most `room` deep within each other."""
    if not isinstance(value, (list, dict)):
        return True
    return room > 0 and all(_is_flat(item, room - 1) for item in (value.values() if isinstance(value, dict) else value))


def _repr(thing: object) -> str:
    try:
        return repr(thing)[:4096]
    except Exception as error:
        return f"a {type(thing).__name__} ({type(error).__name__})"


def _short(data: dict[str, Any]) -> dict[str, Any]:
    """The data of an event that was too long: every value cut, so that at least its beginning is kept."""
    return {
        name: value if isinstance(value, (int, float)) else str(value)[:1024] for name, value in list(data.items())[:16]
    }


# What a script calls.

_opened: Stream | None = None
_is_mute = False
_said: dict[str, Any] = {"stopping": False, "finished": False, "step": None, "steps": None}
_line: list[list[int]] = []  # [step, generation] of every checkpoint that the next one descends from, in order


def log(step: int, **values: float) -> None:
    """Numbers of one step, such as log(step, loss=0.3). Every rank may log; pages show rank 0 first."""
    if stream := _stream():
        stream.log(step, **values)


def progress(step: int, total: int) -> None:
    """How far it is: the progress bar and the time that is left."""
    if stream := _stream():
        try:
            _said.update(step=int(step), steps=int(total))
            stream.event("progress", step=int(step), steps=int(total))
        except Exception:
            stream.refuse("progress", f"progress({_repr(step)}, {_repr(total)}) are not two numbers; skipped")


def event(kind: str, **data: Any) -> None:
    """Something worth a line in the job's history."""
    if stream := _stream():
        stream.event(kind, **data)


def stopping() -> bool:
    """Whether Vigil wants this attempt to end: save with `checkpoint`, then leave with exit code 0.

    A script that asks takes stopping into its own hands: TERM no longer ends it (unless it has a handler of its own).
    Once it has heard True, exit code 0 means that it is to go on later, from what it has saved: one that is done all
    the same says `finished`, or has told `progress` of its last step.
    With several ranks, ask on one and tell the others: they may hear of it at different steps.
    """
    if _stream() is None:
        return False
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not _is_asked():
        return False
    if not _said["stopping"]:
        _said["stopping"] = True
        _leave_word()
    return True


def finished() -> None:
    """All is done: exit code 0 then means that, even where the attempt was asked to stop."""
    if _stream() is not None:
        _said["finished"] = True


def resume_path() -> Path | None:
    """The path of the checkpoint that this start goes on from: the file or folder once given to `checkpoint`."""
    name = os.environ.get("VIGIL_RESUME", "")
    if not name or _stream() is None:
        return None
    folder = _checkpoints() / name
    try:
        layout = json.loads((folder / "COMMITTED").read_text())["layout"]
        form, kept = str(layout["form"]), os.path.basename(str(layout["name"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        _say(f"{folder} is no checkpoint of a script: {error!r}")
        return None
    if form != "archive":
        return folder / kept if form == "file" else folder
    unpacked = _attempt() / "resume" / f"{os.environ['VIGIL_INCARNATION']}.{_rank()}" / kept
    if not unpacked.exists():
        shutil.unpack_archive(folder / "folder.tar", unpacked)
    return unpacked


def checkpoint(path: str | os.PathLike[str], step: int, *, consumed_samples: int = 0) -> Path | None:
    """Copy a file or folder into the job's checkpoints, whole or not at all; where it lies, or None if it does not.

    The next start of this job finds it by `resume_path`. Of several ranks only rank 0 commits; the others' calls do
    nothing, so call it when all have written. The copy is read while it is written: don't change the file meanwhile.
    """
    stream = _stream()
    if stream is None or _rank() != 0:
        return None
    began = time.monotonic()
    stream.flush(wait=10)  # a resume begins after this step: what was logged before it must not be lost
    try:
        return _commit(stream, Path(path), int(step), int(consumed_samples), began)
    except Exception as error:  # a disk, a folder or a number that is not what it should be: training goes on
        _say(f"no checkpoint at step {step}: {error}")
        stream.event("checkpoint.skipped", step=step, reason=str(error)[:500], failed=True)
        return None


def _stream() -> Stream | None:
    """This process's stream, opened by the first call; None outside a Vigil job and in a forked child."""
    global _opened, _is_mute
    if _opened is None and not _is_mute and "VIGIL_ATTEMPT_DIR" in os.environ:
        rank, incarnation = _rank(), int(os.environ.get("VIGIL_INCARNATION") or 0)
        try:
            _opened = Stream(_attempt(), rank=rank, incarnation=incarnation)
        except RuntimeError as error:  # no thread is left for this user, or Python has begun to end
            _is_mute = True
            _say(f"nothing is reported: {error}")
            return None
        atexit.register(_leave_word)
        _line[:] = _resumed_line()
        if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:  # else the script has a use of its own for it
            _leave_stacks(f"{incarnation}.{rank}.txt")
    return _opened if _opened is not None and _opened.mine else None


def _leave_stacks(name: str) -> None:
    """So that Vigil can ask for stacks when the script does not stop."""
    with suppress(OSError, ValueError):
        stacks = os.open(_attempt() / "stacks" / name, _APPEND, 0o640)
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)


def _is_asked() -> bool:
    return os.path.exists(_attempt() / "stop-requested")  # Path.exists would raise what its file system errs


def _leave_word() -> None:
    """How far it was when it left, for the launcher, which cannot tell who stopped from who was done by exit code 0."""
    if _opened is None or not _opened.mine or not _is_asked():
        return
    name = f"said-{os.environ.get('VIGIL_INCARNATION') or 0}.{_rank()}.json"
    with suppress(OSError):  # a full disk: then its exit code alone counts
        _write_durable(_attempt() / name, json.dumps(_said).encode())


def _rank() -> int:
    """torchrun's word, else that of who else starts one process a rank: Open MPI, MPICH, plain srun."""
    return _number_of("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", default=0)


def _world_size() -> int:
    return _number_of("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", default=1)


def _number_of(*names: str, default: int) -> int:
    """The first of these variables that is a number."""
    found = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in found if value.isascii() and value.isdigit()), default)


def _attempt() -> Path:
    return Path(os.environ["VIGIL_ATTEMPT_DIR"])


def _checkpoints() -> Path:
    return Path(os.environ["VIGIL_RUN_DIR"]) / "job" / "checkpoints"


def _generation() -> int:
    return int(os.environ.get("VIGIL_GENERATION") or 0)


def _resumed_line() -> list[list[int]]:
    try:
        told = json.loads((_checkpoints() / os.environ["VIGIL_RESUME"] / "COMMITTED").read_text())
        return [[int(step), int(made)] for step, made in [*told["ancestors"], (told["step"], told["generation"])]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _check_fence() -> None:
    newest = int((Path(os.environ["VIGIL_RUN_DIR"]) / "job" / "GENERATION").read_text())
    if newest > _generation():
        raise ValueError(f"a newer launch of this job has taken over (generation {newest})")


def _commit(stream: Stream, path: Path, step: int, consumed_samples: int, began: float) -> Path:
    """Copy beside, write the manifest last, rename: as Vigil's own trainer does (training/checkpoint/saving.py)."""
    generation, target = _generation(), _checkpoints() / f"step-{step}"
    if min(step, consumed_samples) < 0:
        raise ValueError("a step and samples are counted from 0 on")
    _check_fence()
    if _is_asked() and [step, generation] in _line[-1:]:  # it saved this step by its own plan, and was asked just then
        _tell_saved(stream, step, target)
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
            "parent": _line[-1] if _line else None,
            "ancestors": _line,
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
        _make_room(target)
        os.rename(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _sync_folder(target.parent)
    parent = _line[-1] if _line else (None, None)
    _line.append([step, generation])
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
    if _is_asked():
        _tell_saved(stream, step, target)
    stream.flush(wait=5)
    return target


def _tell_saved(stream: Stream, step: int, target: Path) -> None:
    """Tells the launcher that the stop's checkpoint is committed."""
    with suppress(OSError):  # a disk that is full by now: what is committed is so all the same
        _write_durable(_attempt() / "stopped.json", json.dumps({"step": step, "name": target.name}).encode())
    stream.event("stop.saved", step=step)


def _make_room(target: Path) -> None:
    """What stands under this name came from elsewhere in the line of descent; it keeps its data under a longer name."""
    try:
        told = json.loads((target / "COMMITTED").read_text())
    except FileNotFoundError:
        return
    if told["generation"] == _generation():
        raise ValueError("this start has committed this step already")
    os.rename(target, target.with_name(f"{target.name}.g{told['generation']}"))


def _copy(path: Path, staging: Path) -> tuple[str, list[dict[str, Any]]]:
    """The bytes, fsynced, with their digests. A folder with folders or odd names in it becomes one archive."""
    if path.is_file():
        if not FILE.fullmatch(path.name):
            raise ValueError(f"{path.name!r} is not a plain file name: letters, digits, dots, dashes, underscores")
        return "file", [_copy_file(path, staging / path.name)]
    inside = sorted(path.iterdir())
    if not inside:
        raise ValueError(f"{path} is empty")
    if all(entry.is_file() and FILE.fullmatch(entry.name) for entry in inside):
        return "folder", [_copy_file(entry, staging / entry.name) for entry in inside]
    return _archive(path, staging)


def _archive(path: Path, staging: Path) -> tuple[str, list[dict[str, Any]]]:
    archive = Path(shutil.make_archive(str(staging / "folder"), "tar", root_dir=path))
    return "archive", [_copy_file(archive, archive)]


def _copy_file(source: Path, target: Path) -> dict[str, Any]:
    """Copy (or, where it lies there already, only read) one file; what the manifest says of it."""
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
