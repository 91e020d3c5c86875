"""Test what belongs to the node and not to a GPU: its memory, its scratch disk, and the folders that jobs need."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence

from training.burnin.results import FAILED, MAX_TEXT, emit, outcome_of, result

BLOCK = 1 << 22
MAX_DISK_BYTES = 1 << 30
MAX_MEMORY_BYTES = 1 << 32
MEMORY_SHARE = 0.25  # of the available memory: jobs that start next must find it free
MOUNT_TIMEOUT_S = 20.0
# Runs in a process of its own: a call to a server that hangs cannot be interrupted. A folder that is closed to the
# tests' user is no fault of the node: the file system has answered. It prints which mount holds the folder.
MOUNT_PROBE = """
import os, sys
try:
    os.statvfs(sys.argv[1])
    next(os.scandir(sys.argv[1]), None)
    folder = os.open(sys.argv[1], os.O_PATH)
    print(open(f"/proc/self/fdinfo/{folder}").read())
except PermissionError:
    pass
"""
MAX_TYPE_CHARS = 40


def test_host(mounts: Sequence[str], scratch: str, *, seconds: float) -> None:
    """Test mounts, memory and disk; the last two share the seconds."""
    for folder in mounts:
        emit({"begin": "mount", "item": folder})
        test_mount(folder)
    emit({"begin": "host memory", "item": "memory"})
    test_host_memory(until=time.monotonic() + seconds / 2)
    emit({"begin": "disk", "item": scratch})
    test_disk(scratch, until=time.monotonic() + seconds / 2)


def test_mount(folder: str) -> None:
    """Check that a folder can be opened, and how long that takes; report which file system it is on.

    Where a file system is not mounted, its mount point is an empty folder of another one: peers tell them apart.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", MOUNT_PROBE, folder], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        about, errors = process.communicate(timeout=MOUNT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # without waiting: a process that hangs in the kernel does not end
        emit(result("mount", folder, outcome=FAILED, detail=f"did not answer within {MOUNT_TIMEOUT_S:.0f} s"))
        return
    if process.returncode:
        last = (errors.strip().splitlines() or ["cannot be opened"])[-1]
        why = "cannot be opened: " + last.partition("] ")[2].partition(":")[0] if "] " in last else last
        emit(result("mount", folder, outcome=FAILED, detail=why))
        return
    milliseconds = (time.monotonic() - began) * 1000
    fstype, source = _mount_in(about)
    emit(result("mount", folder, value=milliseconds, unit="ms") | {"fstype": fstype, "source": source})


def _mount_in(about: str) -> tuple[str, str]:
    """Return type and source of the mount that an open folder's fdinfo names; empty if it names none."""
    found = re.search(r"^mnt_id:\s*(\d+)$", about, re.MULTILINE)
    if found is None:
        return "", ""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        return mount_of(found[1], file)


def mount_of(number: str, mountinfo: Iterable[str]) -> tuple[str, str]:
    """Return a mount's type and source, such as ("nfs4", "filer:/export/data"); empty if it is not in mountinfo.

    proc_pid_mountinfo(5): optional fields end with a hyphen, and the kernel writes spaces in octal.
    """
    for line in mountinfo:
        about, _, what = line.partition(" - ")
        if about.split(" ")[0] == number and what.count(" ") >= 1:
            fstype, source = what.split(" ")[:2]
            source = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), source)
            return fstype[:MAX_TYPE_CHARS], source[:MAX_TEXT]
    return "", ""


def test_host_memory(*, until: float) -> None:
    """Write patterns to a part of the host's memory and read them back; a pass takes no longer than the time left."""
    most = max(1, min(MAX_MEMORY_BYTES, int(_available_memory() * MEMORY_SHARE)) // BLOCK)
    began, passed, wrong = time.monotonic(), 0, 0
    while not passed or time.monotonic() < until:
        pattern = os.urandom(64) * (BLOCK // 64)
        half = time.monotonic() + (until - time.monotonic()) / 2
        blocks: list[bytearray] = []
        while len(blocks) < most and not (blocks and time.monotonic() > half):
            blocks.append(bytearray(pattern))
        wrong += sum(block != pattern for block in blocks)
        passed += len(blocks)
    rate = 2 * BLOCK * passed / (time.monotonic() - began) / 1e9
    detail = f"{wrong:,} blocks of 4 MiB read back differ from what was written" if wrong else ""
    emit(result("host memory", "memory", outcome=outcome_of(not wrong), value=rate, unit="GB/s", detail=detail))


def test_disk(scratch: str, *, until: float) -> None:
    """Write a file of random data through to the disk, read it back without the page cache, and compare."""
    try:
        writing, reading, is_equal = _write_and_read(scratch, until)
    except OSError as error:
        emit(result("disk", scratch, outcome=FAILED, detail=f"cannot be used: {error.strerror or error}"))
        return
    detail = "" if is_equal else "a file read back differs from what was written"
    emit(result("disk", f"write {scratch}", outcome=outcome_of(is_equal), value=writing, unit="GB/s", detail=detail))
    emit(result("disk", f"read {scratch}", outcome=outcome_of(is_equal), value=reading, unit="GB/s", detail=detail))


def _write_and_read(scratch: str, until: float) -> tuple[float, float, bool]:
    """Return GB/s written and read, and whether the data were the same."""
    with tempfile.TemporaryFile(dir=scratch, buffering=0) as file:  # without a name: it goes with a killed process
        room = os.statvfs(scratch)
        most = min(MAX_DISK_BYTES, room.f_bavail * room.f_frsize // 4) // BLOCK * BLOCK
        written, began, checksum = 0, time.monotonic(), hashlib.blake2b()
        half = began + (until - began) / 2
        for block in _blocks():
            if written and (written >= most or time.monotonic() > half):
                break
            file.write(block)
            checksum.update(block)
            written += BLOCK
        os.fsync(file.fileno())
        writing = written / (time.monotonic() - began) / 1e9
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        began, found = time.monotonic(), hashlib.blake2b()
        while data := os.read(file.fileno(), BLOCK):
            found.update(data)
        reading = written / (time.monotonic() - began) / 1e9
    return writing, reading, found.digest() == checksum.digest()


def _blocks() -> Iterator[bytes]:
    """Yield blocks that differ and do not compress, without the cost of a random generator for each."""
    base = os.urandom(BLOCK)
    for number in range(1 << 62):
        yield number.to_bytes(8, "little") + base[8:]


def _available_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return int(BLOCK / MEMORY_SHARE)
