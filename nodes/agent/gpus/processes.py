"""Identify processes on GPUs: their user, name and job."""

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

MAX_PROCESSES = 500
MAX_NAME = 64
MAX_ENVIRONMENT = 256 * 1024
_SLURM = re.compile(r"/job_(\d{1,10})(?:/|$)", re.M)
LOCAL_JOB, SLURM_JOB = b"VIGIL_LOCAL_JOB=", b"SLURM_JOB_ID="


def job_of_cgroup(text: str) -> str:
    """Return the job id in /proc/PID/cgroup: Slurm creates …/job_<id>/step_… in both cgroup versions."""
    match = _SLURM.search(text)
    return match[1] if match else ""


def is_running_jobs(proc_root: Path) -> bool:
    """Return whether a process is in a job's control group."""
    pids = (name for name in proc.names(proc_root) if name.isdigit())
    return any(job_of_cgroup(proc.read(proc_root / pid / "cgroup", 16_384)) for pid in pids)


def job_of_environment(text: bytes) -> str:
    """Return the job id from an environment: from the local scheduler's job folder, else Slurm's id."""
    for marker in (LOCAL_JOB, SLURM_JOB):
        for variable in text.split(b"\0"):
            if variable.startswith(marker):
                name = variable.removeprefix(marker).rstrip(b"/").rpartition(b"/")[2]
                if name.isdigit() and len(name) <= 10:
                    return name.decode()
    return ""


@dataclass(frozen=True)
class GpuProcess:
    """Properties of a process that do not change."""

    uid: int
    name: str
    job: str
    is_self_declared: bool = False  # the job is from its environment, which could name any job


class UserNames:
    """Looks up names of Unix users in a thread, because a directory service may be slow.

    Until a name is known, the user's number stands for it.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._requested: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def name(self, uid: int) -> str:
        if uid not in self._names:
            self._names[uid] = str(uid)
            self._requested.put(uid)
            if self._thread is None:
                self._thread = threading.Thread(target=self._resolve, daemon=True)
                self._thread.start()
        return self._names[uid]

    def is_resolved(self, uid: int) -> bool:
        """Return whether the user's name is known: the portal cannot compare a bare number with a job's user."""
        return self._names.get(uid, str(uid)) != str(uid)

    def _resolve(self) -> None:
        while True:
            uid = self._requested.get()
            with suppress(KeyError, OSError):
                self._names[uid] = clean(pwd.getpwuid(uid).pw_name, MAX_NAME)


@dataclass
class GpuProcesses:
    """The processes on this node's GPUs. `proc` is where the kernel's files are."""

    proc: Path = Path("/proc")
    users: UserNames = field(default_factory=UserNames)
    _cached: dict[tuple[int, str], GpuProcess] = field(default_factory=dict)

    def payloads(self, counters: GpuCounters | None, gpus: Sequence[GpuInfo]) -> list[dict[str, Any]]:
        """Return all processes in the format of protocols.md §11."""
        pairs = zip(gpus, counters.processes if counters else (), strict=False)
        found = [(gpu.uuid, entry) for gpu, some in pairs for entry in some or () if gpu.uuid][:MAX_PROCESSES]
        cached, payloads = self._cached, []
        self._cached = {}
        for uuid, entry in found:
            pid = entry.get("pid", 0)
            key = (pid, self._start_time(pid))
            process = self._cached[key] = cached.get(key) or self._read(pid)
            payloads.append(self._payload(uuid, pid, entry.get("memory_mib"), process))
        return payloads

    def _payload(self, uuid: str, pid: int, memory_mib: int | None, process: GpuProcess) -> dict[str, Any]:
        user = self.users.name(process.uid) if process.uid >= 0 else ""
        is_trusted = not process.is_self_declared or process.uid == os.geteuid() or self.users.is_resolved(process.uid)
        job = process.job if is_trusted else ""
        payload = {"gpu": uuid, "pid": pid, "user": user, "name": process.name, "job": job}
        return payload | ({"memory_mib": memory_mib} if memory_mib is not None else {})

    def _start_time(self, pid: int) -> str:
        """Return the start time, which with the pid distinguishes a process from a later one."""
        fields = proc.read(self.proc / str(pid) / "stat", 4096).rpartition(")")[2].split()
        return fields[19] if len(fields) > 19 else ""

    def _read(self, pid: int) -> GpuProcess:
        folder = self.proc / str(pid)
        try:
            uid = os.stat(folder).st_uid
        except OSError:
            return GpuProcess(-1, "", "")
        name = clean(proc.read(folder / "comm", 256), MAX_NAME)
        if job := job_of_cgroup(proc.read(folder / "cgroup", 16_384)):
            return GpuProcess(uid, name, job)
        return GpuProcess(uid, name, job_of_environment(_environment(folder)), is_self_declared=True)


def _environment(folder: Path) -> bytes:
    """Return the environment that the process was started with, if it is readable."""
    try:
        with open(folder / "environ", "rb") as file:
            return file.read(MAX_ENVIRONMENT)
    except OSError:
        return b""
