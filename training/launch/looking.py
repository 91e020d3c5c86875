"""`python -m training.launch.looking`: a last look at a node, as one JSON file in the attempt's folder.

Started by a launcher (last_look), asked by standard input. Nobody waits for it long, so it ends itself after five
seconds whatever holds it; what it asks of a driver, which may hold it for ever, is asked by a child that is not waited
for. What it could not see is said as such.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from training.attempt.files import FULL, write_json
from training.launch.kept import Kept

FOLDER = "looks"
VERSION = 1
SECONDS = 5.0
DRIVER_SECONDS = 3.0
NICE = 10  # the next incarnation's ranks come first
BACK_SECONDS = 600.0  # of the kernel's log
MOST_BYTES = 256 * 1024  # of the file
KERNEL_LINES, KERNEL_BYTES, LINE_BYTES = 1_000, 64 * 1024, 1024
SMI_BYTES = 128 * 1024
RECORD_BYTES = 16 * 1024  # a read with less room than a record takes is refused
RECORDS = 50_000  # of a ring that goes round while it is read
PROBE_BYTES = 65_536
MIB = 1 << 20
UNANSWERED = "it had not answered"
Told = dict[str, Any]


def main() -> int:
    signal.alarm(int(SECONDS))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    asked: Told = json.load(sys.stdin)
    with suppress(OSError):
        os.nice(NICE)
    return 0 if look(**asked) else 1


def look(folder: str, reserve: str, *, asks_driver: bool, **about: Any) -> bool:
    """Whether it could be written, with what is known `about` the node. What takes no time is written at once: it is
    there whatever becomes of the rest."""
    driver = _Driver() if asks_driver else None
    path = Path(folder) / FOLDER / f"{about['incarnation']}.{about['node_rank']}.json"
    unseen = {"disk": UNANSWERED} | ({"nvidia-smi": UNANSWERED} if driver else {})
    told: Told = {"version": VERSION, "at": time.time(), **about, "not_seen": unseen}
    _tell(told, "kernel", kernel)
    with suppress(OSError):
        write_json(path, told)
    _tell(told, "disk", lambda: (disk(Path(folder)), ""))
    if driver is not None:
        _tell(told, "nvidia-smi", driver.answer)
    text, short = json.dumps(told), json.dumps(_short(told))
    return Kept(Path(folder), reserve).write(path, text if len(text) <= MOST_BYTES else short, short)


def _tell(told: Told, what: str, ask: Callable[[], tuple[Any, str]]) -> None:
    """Add what is found, and what of it could not be seen."""
    try:
        told[what.replace("-", "_")], problem = ask()
    except OSError as error:
        problem = f"{error.filename or what}: {error.strerror}"
    told["not_seen"].pop(what, None)
    if problem:
        told["not_seen"][what] = problem


def _short(told: Told) -> Told:
    """Without what is long."""
    left_out = [name for name in ("kernel", "nvidia_smi") if told.get(name)]
    not_seen = told["not_seen"] | {name.replace("_", "-"): "no room" for name in left_out}
    return {name: value for name, value in told.items() if name not in left_out} | {"not_seen": not_seen}


def disk(folder: Path) -> Told:
    """Room and inodes of the run directory's file system, and whether a small file may be written: a quota says no
    where there is room for others."""
    found = os.statvfs(folder)
    told: Told = {
        "total_mib": found.f_blocks * found.f_frsize // MIB,
        "free_mib": found.f_bavail * found.f_frsize // MIB,
        "inodes": found.f_files,
        "inodes_free": found.f_favail,
        "problem": "",
    }
    probe = folder / FOLDER / f".probe.{os.getpid()}"
    try:
        with open(probe, "wb", buffering=0) as file:
            file.write(b"\0" * PROBE_BYTES)
            os.fsync(file.fileno())
    except OSError as error:
        told["problem"] = errno.errorcode.get(error.errno or 0, "") if error.errno in FULL else str(error.strerror)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return told


def kernel() -> tuple[list[tuple[float, str]], str]:
    """What the kernel itself said in the last ten minutes, Unix time and text; and whether that is not all."""
    path = os.environ.get("VIGIL_KMSG") or "/dev/kmsg"
    since_boot, now = time.clock_gettime(time.CLOCK_MONOTONIC), time.time()
    kept: deque[tuple[float, str]] = deque(maxlen=KERNEL_LINES)
    count = 0
    with open(path, "rb", buffering=0, opener=_without_waiting) as file:
        for record in _records(file):
            head, found, text = record.partition(b";")
            parts = head.split(b",")
            if not found or len(parts) < 3 or not (parts[0].isdigit() and parts[2].isdigit()):
                continue
            age = since_boot - int(parts[2]) / 1e6
            if int(parts[0]) >> 3 == 0 and age <= BACK_SECONDS:  # 0: no program wrote it
                count += 1
                kept.append((round(now - age, 3), text.partition(b"\n")[0][:LINE_BYTES].decode(errors="replace")))
    size = sum(len(text) + 24 for _, text in kept)
    while size > KERNEL_BYTES:
        size -= len(kept.popleft()[1]) + 24
    return list(kept), "only the newest lines were kept" if len(kept) < count else ""


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _records(file: IO[bytes]) -> Any:
    """A record a read, as /dev/kmsg gives them; of a plain file a line."""
    if os.path.isfile(file.name):
        yield from file.read(RECORDS * 64).split(b"\n")
        return
    for _ in range(RECORDS):
        try:
            record = os.read(file.fileno(), RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # the ring went round: the next read tells the oldest that is left
            continue
        if not record:
            return
        yield record


class _Driver:
    """`nvidia-smi -q`, which may hang in the driver where no signal reaches it: it is killed, and not waited for."""

    def __init__(self) -> None:
        self._until = time.monotonic() + DRIVER_SECONDS
        self._process: subprocess.Popen[bytes] | None = None
        if (program := shutil.which("nvidia-smi")) is None:
            return
        with suppress(OSError):
            self._process = subprocess.Popen(
                [program, "-q"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )

    def answer(self) -> tuple[str, str]:
        """What it said, and what is wrong with that."""
        process = self._process
        if process is None:
            return "", "there is no nvidia-smi on this node, or it cannot be started"
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        said, is_open = b"", True
        while is_open and time.monotonic() < self._until:
            with suppress(BlockingIOError):
                piece = os.read(process.stdout.fileno(), 65_536)
                is_open = bool(piece)
                said += piece[: max(0, SMI_BYTES - len(said))]
                continue
            time.sleep(0.01)
        if is_open:
            process.kill()
        text = said.decode(errors="replace")
        return text, f"it did not end within {DRIVER_SECONDS:.0f} s" if is_open else ""


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a child that the driver holds is nobody's to wait for
