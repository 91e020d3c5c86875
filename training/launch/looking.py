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
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from training.attempt.files import FULL
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
Told = dict[str, Any]


def main() -> int:
    signal.alarm(int(SECONDS))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    asked: Told = json.load(sys.stdin)
    with suppress(OSError):
        os.nice(NICE)
    driver = _Driver() if asked.pop("asks_driver") else None
    folder, reserve = Path(asked.pop("folder")), asked.pop("reserve")
    told: Told = {"version": VERSION, "at": time.time(), **asked, "not_seen": {}}
    for name, look in (("disk", lambda: disk(folder)), ("kernel", kernel)):
        try:
            told[name] = look()
        except OSError as error:
            told["not_seen"][name] = f"{error.filename or name}: {error.strerror}"
    short = json.dumps({**told, "kernel": []})
    if driver is not None:
        said, problem = driver.answer()
        told["nvidia_smi"] = said
        if problem:
            told["not_seen"]["nvidia-smi"] = problem
    text = json.dumps(told)
    target = Path(FOLDER) / f"{asked['incarnation']}.{asked['node_rank']}.json"
    return 0 if Kept(folder, reserve).write(target, text if len(text) <= MOST_BYTES else short, short) else 1


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


def kernel() -> list[tuple[float, str]]:
    """What the kernel itself said in the last ten minutes, the newest of it: Unix time and text."""
    path = os.environ.get("VIGIL_KMSG") or "/dev/kmsg"
    since_boot, now = time.clock_gettime(time.CLOCK_MONOTONIC), time.time()
    kept: deque[tuple[float, str]] = deque(maxlen=KERNEL_LINES)
    with open(path, "rb", buffering=0, opener=_without_waiting) as file:
        for record in _records(file):
            head, found, text = record.partition(b";")
            parts = head.split(b",")
            if not found or len(parts) < 3 or not (parts[0].isdigit() and parts[2].isdigit()):
                continue
            age = since_boot - int(parts[2]) / 1e6
            if int(parts[0]) >> 3 == 0 and age <= BACK_SECONDS:  # 0: no program wrote it
                kept.append((round(now - age, 3), text.partition(b"\n")[0][:LINE_BYTES].decode(errors="replace")))
    size = 0
    for index in range(len(kept) - 1, -1, -1):
        size += len(kept[index][1]) + 24
        if size > KERNEL_BYTES:
            return list(kept)[index + 1 :]
    return list(kept)


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
