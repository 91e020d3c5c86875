"""Run jobs on this machine with the same interface, batch script and run directory as under Slurm.

All state is in files under one folder on a local disk. Each job has a watcher process (shim.py) that runs without any
portal process. See slots.py for the queue and docs/decisions for the reasons.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nodes.schedulers.base import JobStatus, Listing, NodeStatus, SchedulerError, SlurmStep, Submission
from nodes.schedulers.cluster import AccountsInfo, LicenseInfo, PartitionInfo, QueuedJobInfo, ReservationInfo
from nodes.schedulers.local import job_queue, job_user, machine, processes, shim, slots
from nodes.schedulers.local.capabilities import CAPABILITIES
from nodes.schedulers.local.machine import LocalGpu

# A job's environment consists of these and the submission's variables; nothing else is inherited.
INHERITED_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
)
START_WAIT_S = 15
RETENTION_S = 30 * 86_400  # of ended jobs' folders
FINAL = frozenset({"completed", "failed", "cancelled", "timeout", "node_fail", "out_of_memory"})


class LocalScheduler:
    """Implement nodes.schedulers.base.Scheduler on this machine."""

    capabilities = CAPABILITIES

    def __init__(
        self,
        root: Path,
        *,
        cpus: int | None = None,
        gpus: Iterable[LocalGpu] | None = None,
        memory_mib: int | None = None,
        user: str = "",
        inherited: Iterable[str] = (),
    ) -> None:
        """Set up the folders under `root`.

        `cpus` may exceed the cores, to oversubscribe them; `user` is the Unix user that jobs run as, if not ours.
        """
        self.root = str(root.absolute())
        self.user = user
        self.inherited = (*INHERITED_VARIABLES, *inherited)
        self.cpus = cpus or max(2, len(os.sched_getaffinity(0)))  # two, so that two ranks always fit
        self.gpus = tuple(gpus) if gpus is not None else machine.find_gpus()
        self.memory_mib = memory_mib or machine.memory_mib()
        for name in ("jobs", "keys", "queue"):
            os.makedirs(os.path.join(self.root, name), mode=0o700, exist_ok=True)

    def submit(self, submission: Submission) -> str:
        """Write the request, then start its watcher. Submitting a key again returns the same job."""
        self._check(submission)
        with slots.locked(self.root):
            slots.write_capacity(self.root, self._capacity())
            job_id = self._job_with_key(submission.key)
            if job_id is None:
                job_id = self._write_request(submission)
        self._start(job_id)
        return str(job_id)

    def submit_array(self, submission: Submission, tasks: Sequence[int], *, at_once: int | None) -> list[str]:
        raise SchedulerError("The local scheduler does not support arrays. Submit jobs one by one.", permanent=True)

    def find(self, key: str, *, user: str = "", task: int | None = None) -> str | None:
        job_id = self._job_with_key(key)
        return None if job_id is None else str(job_id)

    def status(self, scheduler_ids: list[str]) -> dict[str, JobStatus]:
        found = {}
        for scheduler_id in scheduler_ids:
            if scheduler_id.isdecimal() and (status := self._status(int(scheduler_id))) is not None:
                found[scheduler_id] = status
        return found

    def steps(self, scheduler_id: str, restart_count: int = 0) -> tuple[SlurmStep, ...]:
        """Return nothing: the local scheduler has no accounting."""
        return ()

    def release(self, scheduler_id: str, *, user: str = "") -> None:
        """Do nothing: the local scheduler never holds a job."""

    def cancelled_by(self, scheduler_id: str, restart_count: int = 0) -> str:
        """Return "": the local scheduler has no accounting."""
        return ""

    def signal(self, scheduler_id: str, name: str, *, user: str = "") -> None:
        if name not in {"TERM", "USR1", "KILL"}:
            raise SchedulerError(f"{name} cannot be sent to jobs. Use TERM, USR1 or KILL.", permanent=True)
        self._send_command(scheduler_id, name)

    def cancel(self, scheduler_id: str, *, user: str = "") -> None:
        self._send_command(scheduler_id, "CANCEL")

    def nodes(self) -> Listing[NodeStatus]:
        with slots.locked(self.root):
            slots.write_capacity(self.root, self._capacity())
            free = slots.free(self._capacity(), slots.alive(self.root))
            drain_order, reserved = slots.drain_order(self.root), slots.reservation(self.root)
        cpus_used, gpus_used = self.cpus - free["cpus"], len(self.gpus) - len(free["gpus"])
        busy = [gpu.index for gpu in self.gpus if gpu.index not in free["gpus"]]
        idle, full = not cpus_used and not gpus_used, cpus_used >= self.cpus
        state = "idle" if idle else "allocated" if full else "mixed"
        if drain_order is not None:
            state = "drained" if idle else "draining"
        elif reserved is not None:
            state = f"{state}+reserved"
        node = NodeStatus(
            name=shim.node_names(1)[0],
            state=state,
            reason=drain_order["reason"] if drain_order else "",
            reason_by=drain_order["by"] if drain_order else "",
            reason_at=drain_order["at"] if drain_order else None,
            partitions=(job_queue.PARTITION,),
            cpus=self.cpus,
            cpus_used=cpus_used,
            gpus=len(self.gpus),
            gpus_used=gpus_used,
            gpu_type=self.gpus[0].name if self.gpus else "",
            gpus_allocated=tuple(int(index) for index in busy if index.isdecimal()),
            memory_mib=self.memory_mib,
            memory_used_mib=self.memory_mib - free["memory_mib"],
            plays_many=True,
        )
        return Listing([node])

    def queue(self) -> Listing[QueuedJobInfo]:
        with slots.locked(self.root):
            jobs = slots.alive(self.root)
        return Listing(job_queue.queued_jobs(self.root, jobs, user=self.user))

    def partitions(self) -> Listing[PartitionInfo]:
        only = PartitionInfo(name=job_queue.PARTITION, is_default=True, nodes=(shim.node_names(1)[0],))
        return Listing([only])

    def reservations(self) -> Listing[ReservationInfo]:
        with slots.locked(self.root):
            reserved = slots.reservation(self.root)
        node = shim.node_names(1)[0]
        found = [ReservationInfo(name=reserved["name"], nodes=(node,), ends_at=reserved["until"])] if reserved else []
        return Listing(found)

    def licenses(self) -> Listing[LicenseInfo]:
        return Listing()

    def clock(self) -> None:
        """Return None: it runs on the worker's machine and shares its clock."""

    def accounts(self) -> AccountsInfo:
        return AccountsInfo()

    def drain(self, node: str, reason: str) -> None:
        self._check_name(node)
        with self._reporting_write_errors(), slots.locked(self.root):
            slots.drain(self.root, reason=reason, by=pwd.getpwuid(os.geteuid()).pw_name)

    def undrain(self, node: str) -> None:
        self._check_name(node)
        with self._reporting_write_errors(), slots.locked(self.root):
            if slots.drain_order(self.root) is None:
                raise SchedulerError(f"{node} is not drained.", permanent=True)
            slots.undrain(self.root, self._capacity())

    def reserve(self, name: str, nodes: Sequence[str], *, seconds: int) -> None:
        for node in nodes:
            self._check_name(node)
        with self._reporting_write_errors(), slots.locked(self.root):
            found = slots.reservation(self.root)
            if found is not None and found["name"] != name:
                raise SchedulerError(f"This machine is reserved already: {found['name']}.")
            if found is None:
                slots.reserve(self.root, name, self._capacity(), until=time.time() + seconds)

    def unreserve(self, name: str) -> None:
        with self._reporting_write_errors(), slots.locked(self.root):
            found = slots.reservation(self.root)
            if found is None or found["name"] == name:
                slots.unreserve(self.root, self._capacity())

    def reserve_window(self, name: str, nodes: Sequence[str], *, starts_at: float, ends_at: float) -> None:
        raise SchedulerError("The local scheduler has no reservations for maintenance.", permanent=True)

    def _check_name(self, node: str) -> None:
        name = shim.node_names(1)[0]
        if node != name:
            raise SchedulerError(f"Unknown node {node}. The local scheduler's only node is {name}.", permanent=True)

    @contextmanager
    def _reporting_write_errors(self) -> Iterator[None]:
        """Turn a failed write into a temporary error, so that the order is carried out once there is space."""
        try:
            yield
        except OSError as error:
            raise SchedulerError(f"Cannot write to {self.root}: {error.strerror}. Free space there.") from error

    def _check(self, submission: Submission) -> None:
        """Raise SchedulerError for a request that could never start."""
        nodes = submission.min_nodes
        for unit, requested, available in (
            ("CPUs", submission.cpus_per_node * nodes, self.cpus),
            ("GPUs", submission.gpus_per_node * nodes, len(self.gpus)),
            ("MiB of memory", (submission.memory_mib_per_node or 0) * nodes, self.memory_mib),
        ):
            if requested > available:
                message = f"{requested:,} {unit} requested, but this machine has {available:,}. Request fewer."
                raise SchedulerError(message, permanent=True)

    def _capacity(self) -> slots.JsonObject:
        return {"cpus": self.cpus, "gpus": [gpu.index for gpu in self.gpus], "memory_mib": self.memory_mib}

    def _job_with_key(self, key: str) -> int | None:
        try:
            return int(os.readlink(self._key(key)))
        except FileNotFoundError:
            return None

    def _key(self, key: str) -> str:
        if not key.isalnum():
            raise SchedulerError(f"{key!r} cannot be a key.", permanent=True)
        return os.path.join(self.root, "keys", key)

    def _write_request(self, submission: Submission) -> int:
        """Create the folder of the next id, complete before the key links to it. Call it under the lock."""
        job_ids = slots.job_ids(self.root)
        last = slots.read_json(os.path.join(self.root, "last.json")) or {"id": 0}
        job_id: int = max([last["id"], *job_ids]) + 1
        slots.write_json(os.path.join(self.root, "last.json"), {"id": job_id})
        job_folder = slots.folder(self.root, job_id)
        os.makedirs(os.path.join(job_folder, "inbox"), mode=0o700)
        slots.write_json(os.path.join(job_folder, "request.json"), self._request(submission))
        os.symlink(str(job_id), self._key(submission.key))
        if job_id % 50 == 0:
            self._prune(job_ids)
        return job_id

    def _request(self, submission: Submission) -> slots.JsonObject:
        user = job_user.find(self.user)
        if user is not None:
            job_user.check_reach(user, submission)
        return {
            "key": submission.key,
            "name": submission.name,
            "script": submission.script,
            "directory": submission.directory,
            "output": submission.output,
            "time_limit_s": submission.time_limit_s,
            "grace_s": submission.grace_s,
            "submitted_at": time.time(),
            "environment": {**self._environment(user), **submission.environment},
            "user": user,
            "ticket": {
                "cpus": submission.cpus_per_node,
                "gpus": submission.gpus_per_node,
                "memory_mib": submission.memory_mib_per_node or 0,
                "begin_at": submission.begin_at,
                "reservation": submission.reservation,
                "min_nodes": submission.min_nodes,
                "max_nodes": submission.max_nodes,
            },
        }

    def _environment(self, user: Mapping[str, Any] | None) -> dict[str, str]:
        """Return a job's environment from an allow list: it must not see the portal's secrets, database or broker."""
        environment = {name: os.environ[name] for name in self.inherited if name in os.environ}
        environment.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
        environment.setdefault("LANG", "C.UTF-8")
        if user is not None:
            environment |= {"USER": user["name"], "LOGNAME": user["name"], "HOME": user["home"], "SHELL": user["shell"]}
        return environment

    def _start(self, job_id: int) -> None:
        """Start the watcher once. It detaches and returns as soon as it has its lock."""
        job_folder = slots.folder(self.root, job_id)
        if os.path.exists(os.path.join(job_folder, "status.json")) or slots.is_locked(
            os.path.join(job_folder, "shim.lock")
        ):
            return
        with open(os.path.join(job_folder, "shim.log"), "ab") as log:
            try:
                done = subprocess.run(
                    [sys.executable, "-I", "-S", shim.__file__, job_folder],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8"},
                    cwd="/",
                    timeout=START_WAIT_S,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise SchedulerError(f"The watcher of job {job_id} could not be started: {error}") from error
        if done.returncode != 0:
            raise SchedulerError(f"The watcher of job {job_id} exited at once: {_tail(log.name)}")

    def _status(self, job_id: int) -> JobStatus | None:
        job_folder = slots.folder(self.root, job_id)
        request = slots.read_json(os.path.join(job_folder, "request.json"))
        if request is None:
            return None
        # Checked before the status is read: a shim that ends in between has written its final status by then.
        watched = slots.is_locked(os.path.join(job_folder, "shim.lock"))
        status = slots.read_json(os.path.join(job_folder, "status.json"))
        if not watched and (status is None or status["state"] not in FINAL):
            status = self._settle(job_id, request)
        status = status or _starting(request)
        return JobStatus(scheduler_id=str(job_id), key=request["key"], **{**status, "nodes": tuple(status["nodes"])})

    def _settle(self, job_id: int, request: slots.JsonObject) -> slots.JsonObject | None:
        """Settle a job without a watcher: start it if it never was, end it if its shim died."""
        job_folder = slots.folder(self.root, job_id)
        if not os.path.exists(os.path.join(job_folder, "shim.json")):
            if time.time() - request["submitted_at"] > START_WAIT_S:  # the submitting process died in between
                self._start(job_id)
            return None
        lock = shim.take_lock(os.path.join(job_folder, "shim.lock"))
        if lock is None:
            return slots.read_json(os.path.join(job_folder, "status.json"))
        try:
            status = slots.read_json(os.path.join(job_folder, "status.json"))
            if status is not None and status["state"] in FINAL:
                return status
            return self._end_orphaned(job_id, job_folder, status or _starting(request))
        finally:
            os.close(lock)

    def _end_orphaned(self, job_id: int, job_folder: str, status: slots.JsonObject) -> slots.JsonObject:
        """Kill what the dead shim's job left behind, then write its final status."""
        recorded = slots.read_json(os.path.join(job_folder, "shim.json")) or {}
        is_same_boot = recorded.get("boot_id") == processes.boot_id()
        deadline = time.monotonic() + 5
        while is_same_boot and processes.kill_marked("VIGIL_LOCAL_JOB", job_folder):
            if time.monotonic() > deadline:
                return {**status, "state": "completing", "reason": "Some of its processes cannot be killed."}
            time.sleep(0.02)
        reason = "Its watcher was killed, and so were its processes." if is_same_boot else "The machine was rebooted."
        status = {**status, "state": "node_fail", "reason": reason, "ended_at": time.time()}
        slots.write_json(os.path.join(job_folder, "status.json"), status)
        slots.release(self.root, job_id, for_good=True)
        return status

    def _send_command(self, scheduler_id: str, command: str) -> None:
        """Put a command into the job's inbox and wake its watcher. Does nothing if the job has ended."""
        if not scheduler_id.isdecimal():
            raise SchedulerError(f"{scheduler_id!r} is not an id of this scheduler.", permanent=True)
        job_folder = slots.folder(self.root, int(scheduler_id))
        status = self._status(int(scheduler_id))
        if status is None or status.state in FINAL:
            return
        with open(os.path.join(job_folder, "inbox", f"{time.time_ns():020}-{command}"), "xb"):
            pass
        recorded = slots.read_json(os.path.join(job_folder, "shim.json"))
        if recorded is not None and processes.is_same(recorded):
            try:
                os.kill(recorded["pid"], signal.SIGHUP)
            except ProcessLookupError:
                return

    def _prune(self, job_ids: list[int]) -> None:
        """Delete the folders of jobs that ended more than RETENTION_S ago."""
        for job_id in job_ids:
            job_folder = slots.folder(self.root, job_id)
            status = slots.read_json(os.path.join(job_folder, "status.json"))
            if status and status["state"] in FINAL and time.time() - (status["ended_at"] or 0) > RETENTION_S:
                request = slots.read_json(os.path.join(job_folder, "request.json"))
                shutil.rmtree(job_folder, ignore_errors=True)
                if request is not None:
                    processes.remove_marker(self._key(request["key"]))


def _starting(request: slots.JsonObject) -> slots.JsonObject:
    """Return the status of a job whose watcher has not written one yet."""
    return {"state": "pending", "submitted_at": request["submitted_at"], "reason": "Starting", "nodes": []}


def _tail(path: str) -> str:
    with open(path, "rb") as file:
        return file.read()[-500:].decode(errors="replace").strip() or "it printed nothing"
