"""Processes on GPUs: whose each is, what it is called, and of which job."""

from __future__ import annotations

import os
import pwd
import queue
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpus.reports import GpuCounters, GpuInfo
from nodes.agent import proc
from nodes.agent.cleaning import clean

MOST = 500
MOST_NAME = 64
MOST_ENVIRONMENT = 256 * 1024
_SLURM = re.compile(r"/job_(\d{1,10})(?:/|$)", re.M)
LOCAL_JOB, SLURM_JOB = b"VIGIL_LOCAL_JOB=", b"SLURM_JOB_ID="


def job_of_cgroup(text: str) -> str:
    """The job of /proc/PID/cgroup: Slurm makes …/job_<id>/step_… in both versions of control groups."""
    match = _SLURM.search(text)
    return match[1] if match else ""


def job_of_environment(text: bytes) -> str:
    """The job that an environment names: the local scheduler's folder of it, else Slurm's number."""
    for marker in (LOCAL_JOB, SLURM_JOB):
        for variable in text.split(b"\0"):
            if variable.startswith(marker):
                name = variable.removeprefix(marker).rstrip(b"/").rpartition(b"/")[2]
                if name.isdigit() and len(name) <= 10:
                    return name.decode()
    return ""


@dataclass(frozen=True)
class Process:
    """What does not change of one while it lives."""

    uid: int
    name: str
    job: str
    is_own_word: bool = False  # its environment names the job, and may name anybody's


class People:
    """Names of Unix users. Asking may take long, as a directory service does, so a thread does it: until it knows, a
    user is their number."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def name(self, uid: int) -> str:
        if uid not in self._names:
            self._names[uid] = str(uid)
            self._asked.put(uid)
            if self._thread is None:
                self._thread = threading.Thread(target=self._answer, daemon=True)
                self._thread.start()
        return self._names[uid]

    def knows(self, uid: int) -> bool:
        """Whether the user is more than a number, which the portal could not hold against a job's."""
        return self._names.get(uid, str(uid)) != str(uid)

    def _answer(self) -> None:
        while True:
            uid = self._asked.get()
            with suppress(KeyError, OSError):
                self._names[uid] = clean(pwd.getpwuid(uid).pw_name, MOST_NAME)


@dataclass
class Processes:
    """`proc` is where the kernel's files are."""

    proc: Path = Path("/proc")
    people: People = field(default_factory=People)
    _known: dict[tuple[int, str], Process] = field(default_factory=dict)

    def tell(self, counters: GpuCounters | None, gpus: Sequence[GpuInfo]) -> list[dict[str, Any]]:
        """All of them, as the contract has them (protocols.md §11)."""
        pairs = zip(gpus, counters.processes if counters else (), strict=False)
        found = [(gpu.uuid, told) for gpu, some in pairs for told in some or () if gpu.uuid][:MOST]
        known, told_of = self._known, []
        self._known = {}
        for uuid, told in found:
            pid = told.get("pid", 0)
            key = (pid, self._start(pid))
            process = self._known[key] = known.get(key) or self._read(pid)
            told_of.append(self._told(uuid, pid, told.get("memory_mib"), process))
        return told_of

    def _told(self, uuid: str, pid: int, memory_mib: int | None, process: Process) -> dict[str, Any]:
        user = self.people.name(process.uid) if process.uid >= 0 else ""
        is_believed = not process.is_own_word or process.uid == os.geteuid() or self.people.knows(process.uid)
        job = process.job if is_believed else ""
        told = {"gpu": uuid, "pid": pid, "user": user, "name": process.name, "job": job}
        return told | ({"memory_mib": memory_mib} if memory_mib is not None else {})

    def _start(self, pid: int) -> str:
        """When it started: with its number, this tells it from a later one."""
        fields = proc.read(self.proc / str(pid) / "stat", 4096).rpartition(")")[2].split()
        return fields[19] if len(fields) > 19 else ""

    def _read(self, pid: int) -> Process:
        folder = self.proc / str(pid)
        try:
            uid = os.stat(folder).st_uid
        except OSError:
            return Process(-1, "", "")
        name = clean(proc.read(folder / "comm", 256), MOST_NAME)
        if job := job_of_cgroup(proc.read(folder / "cgroup", 16_384)):
            return Process(uid, name, job)
        return Process(uid, name, job_of_environment(_environment(folder)), is_own_word=True)


def _environment(folder: Path) -> bytes:
    """What it was started with, where that may be read."""
    try:
        with open(folder / "environ", "rb") as file:
            return file.read(MOST_ENVIRONMENT)
    except OSError:
        return b""
