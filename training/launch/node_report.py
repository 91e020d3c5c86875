"""Write one JSON file about a node's state: `python -m training.launch.node_report`, request on standard input.

Started by a launcher (node_inspection). The process ends itself after five seconds whatever blocks it. The driver may
block forever, so a child queries it that nobody waits for. The file lists what could not be read, and why.
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

from training.attempt.files import DISK_FULL, write_json
from training.launch.disk_reserve import DiskReserve
from training.units import MIB

FOLDER = "looks"
VERSION = 1
SECONDS = 5.0
DRIVER_SECONDS = 3.0
NICE = 10  # the next incarnation's ranks take precedence
KERNEL_LOG_SECONDS = 600.0  # how far back the kernel's log is read
MAX_BYTES = 256 * 1024  # of the file
KERNEL_LINES, KERNEL_BYTES, LINE_BYTES = 1_000, 64 * 1024, 1024
SMI_BYTES = 128 * 1024
RECORD_BYTES = 16 * 1024  # /dev/kmsg refuses reads into a buffer smaller than the record
RECORDS = 50_000  # limit, as the ring buffer may be overwritten while it is read
PROBE_BYTES = 65_536
UNANSWERED = "it had not answered"
Report = dict[str, Any]


def main() -> int:
    signal.alarm(int(SECONDS))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    request: dict[str, Any] = json.load(sys.stdin)
    with suppress(OSError):
        os.nice(NICE)
    return 0 if write_report(**request) else 1


def write_report(folder: str, reserve: str, *, asks_driver: bool, **facts: Any) -> bool:
    """Write the report with `facts` about the node; return whether it could be written.

    Quick readings are written first, so that they are there even if the rest never completes. `asks_driver`: run
    nvidia-smi.
    """
    driver = _NvidiaSmi() if asks_driver else None
    path = Path(folder) / FOLDER / f"{facts['incarnation']}.{facts['node_rank']}.json"
    unread = {"disk": UNANSWERED} | ({"nvidia-smi": UNANSWERED} if driver else {})
    report: Report = {"version": VERSION, "at": time.time(), **facts, "not_seen": unread}
    _add(report, "kernel", kernel_log)
    with suppress(OSError):
        write_json(path, report)
    _add(report, "disk", lambda: (disk(Path(folder)), ""))
    if driver is not None:
        _add(report, "nvidia-smi", driver.read)
    text, short = json.dumps(report), json.dumps(_shortened(report))
    return DiskReserve(Path(folder), reserve).write(path, text if len(text) <= MAX_BYTES else short, short)


def _add(report: Report, name: str, read: Callable[[], tuple[Any, str]]) -> None:
    """Add one reading to the report, and the reason where it failed."""
    try:
        report[name.replace("-", "_")], problem = read()
    except OSError as error:
        problem = f"{error.filename or name}: {error.strerror}"
    report["not_seen"].pop(name, None)
    if problem:
        report["not_seen"][name] = problem


def _shortened(report: Report) -> Report:
    """Return the report without its long parts."""
    dropped = [name for name in ("kernel", "nvidia_smi") if report.get(name)]
    missing = report["not_seen"] | {name.replace("_", "-"): "no room" for name in dropped}
    return {name: value for name, value in report.items() if name not in dropped} | {"not_seen": missing}


def disk(folder: Path) -> Report:
    """Return space and inodes of the run directory's file system, and whether a small file can be written there.

    A quota may refuse the write although there is space for other users.
    """
    stat = os.statvfs(folder)
    report: Report = {
        "total_mib": stat.f_blocks * stat.f_frsize // MIB,
        "free_mib": stat.f_bavail * stat.f_frsize // MIB,
        "inodes": stat.f_files,
        "inodes_free": stat.f_favail,
        "problem": "",
    }
    probe = folder / FOLDER / f".probe.{os.getpid()}"
    try:
        with open(probe, "wb", buffering=0) as file:
            file.write(b"\0" * PROBE_BYTES)
            os.fsync(file.fileno())
    except OSError as error:
        report["problem"] = (
            errno.errorcode.get(error.errno or 0, "") if error.errno in DISK_FULL else str(error.strerror)
        )
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return report


def kernel_log() -> tuple[list[tuple[float, str]], str]:
    """Return the kernel's log of the last ten minutes as (Unix time, text), and a note if that is not all of it."""
    path = os.environ.get("VIGIL_KMSG") or "/dev/kmsg"
    since_boot, now = time.clock_gettime(time.CLOCK_MONOTONIC), time.time()
    lines: deque[tuple[float, str]] = deque(maxlen=KERNEL_LINES)
    count = 0
    with open(path, "rb", buffering=0, opener=_without_waiting) as file:
        for record in _records(file):
            head, found, text = record.partition(b";")
            parts = head.split(b",")
            if not found or len(parts) < 3 or not (parts[0].isdigit() and parts[2].isdigit()):
                continue
            age = since_boot - int(parts[2]) / 1e6
            if int(parts[0]) >> 3 == 0 and age <= KERNEL_LOG_SECONDS:  # 0: written by the kernel, not by a program
                count += 1
                lines.append((round(now - age, 3), text.partition(b"\n")[0][:LINE_BYTES].decode(errors="replace")))
    size = sum(len(text) + 24 for _, text in lines)
    while size > KERNEL_BYTES:
        size -= len(lines.popleft()[1]) + 24
    return list(lines), "only the newest lines were kept" if len(lines) < count else ""


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _records(file: IO[bytes]) -> Any:
    """Yield one record per read, as /dev/kmsg returns them; one line each from a plain file."""
    if os.path.isfile(file.name):
        yield from file.read(RECORDS * 64).split(b"\n")
        return
    for _ in range(RECORDS):
        try:
            record = os.read(file.fileno(), RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # records were overwritten: the next read returns the oldest that is left
            continue
        if not record:
            return
        yield record


class _NvidiaSmi:
    """Runs `nvidia-smi -q`, which may hang in the driver where no signal reaches it.

    It is killed but not waited for.
    """

    def __init__(self) -> None:
        self._until = time.monotonic() + DRIVER_SECONDS
        self._process: subprocess.Popen[bytes] | None = None
        if (program := shutil.which("nvidia-smi")) is None:
            return
        with suppress(OSError):
            self._process = subprocess.Popen(
                [program, "-q"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )

    def read(self) -> tuple[str, str]:
        """Return its output, and a note if that is not all of it."""
        process = self._process
        if process is None:
            return "", "there is no nvidia-smi on this node, or it cannot be started"
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        output, is_open = b"", True
        while is_open and time.monotonic() < self._until:
            with suppress(BlockingIOError):
                piece = os.read(process.stdout.fileno(), 65_536)
                is_open = bool(piece)
                output += piece[: max(0, SMI_BYTES - len(output))]
                continue
            time.sleep(0.01)
        if is_open:
            process.kill()
        text = output.decode(errors="replace")
        return text, f"it did not end within {DRIVER_SECONDS:.0f} s" if is_open else ""


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # do not wait for a child that is blocked in the driver
