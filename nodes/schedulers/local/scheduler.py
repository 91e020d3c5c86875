"""This machine as a scheduler: the same interface, batch script and run directory as under Slurm.

Everything it knows lies in files under one folder on a local disk; each job has a watcher of its own (shim.py) that no
portal process needs to be there for. See slots.py for the queue, docs/decisions for why.
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
from nodes.schedulers.cluster import Accounts, License, Partition, QueuedJob, Reservation
from nodes.schedulers.local import job_queue, job_user, machine, processes, shim, slots
from nodes.schedulers.local.machine import Gpu

# A job's environment is built from these and what the submission says, never inherited.
PASSED_ON = (
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
KEEP_S = 30 * 86_400  # folders of ended jobs
FINAL = frozenset({"completed", "failed", "cancelled", "timeout", "node_fail", "out_of_memory"})


class LocalScheduler:
    """Implements nodes.schedulers.base.Scheduler."""

    has_arrays = False

    def __init__(
        self,
        root: Path,
        *,
        cpus: int | None = None,
        gpus: Iterable[Gpu] | None = None,
        memory_mib: int | None = None,
        user: str = "",
        pass_on: Iterable[str] = (),
    ) -> None:
        """`cpus` may exceed the cores, to oversubscribe; `user`: the Unix user that jobs run as, if not ours."""
        self.root = str(root.absolute())
        self.user = user
        self.pass_on = (*PASSED_ON, *pass_on)
        self.cpus = cpus or max(2, len(os.sched_getaffinity(0)))  # two ranks can meet on the smallest machine
        self.gpus = tuple(gpus) if gpus is not None else machine.find_gpus()
        self.memory_mib = memory_mib or machine.memory_mib()
        for name in ("jobs", "keys", "queue"):
            os.makedirs(os.path.join(self.root, name), mode=0o700, exist_ok=True)

    def submit(self, submission: Submission) -> str:
        """Write the request, then start its watcher. The same key again is the same job."""
        self._check(submission)
        with slots.locked(self.root):
            slots.write_capacity(self.root, self._capacity())
            job_id = self._known(submission.key)
            if job_id is None:
                job_id = self._write_request(submission)
        self._start(job_id)
        return str(job_id)

    def submit_array(self, submission: Submission, tasks: Sequence[int], *, at_once: int | None) -> list[str]:
        raise SchedulerError("This machine takes jobs one by one.", permanent=True)

    def find(self, key: str, *, user: str = "", task: int | None = None) -> str | None:
        known = self._known(key)
        return None if known is None else str(known)

    def status(self, scheduler_ids: list[str]) -> dict[str, JobStatus]:
        found = {}
        for scheduler_id in scheduler_ids:
            if scheduler_id.isdecimal() and (status := self._status(int(scheduler_id))) is not None:
                found[scheduler_id] = status
        return found

    def steps(self, scheduler_id: str, restart_count: int = 0) -> tuple[SlurmStep, ...]:
        """Nothing is accounted here."""
        return ()

    def release(self, scheduler_id: str, *, user: str = "") -> None:
        """Do nothing: here no job is ever held."""

    def cancelled_by(self, scheduler_id: str, restart_count: int = 0) -> str:
        """Return "": nothing is accounted here."""
        return ""

    def signal(self, scheduler_id: str, name: str, *, user: str = "") -> None:
        if name not in {"TERM", "USR1", "KILL"}:
            raise SchedulerError(f"{name} is not a signal that jobs are sent.", permanent=True)
        self._tell(scheduler_id, name)

    def cancel(self, scheduler_id: str, *, user: str = "") -> None:
        self._tell(scheduler_id, "CANCEL")

    def nodes(self) -> Listing[NodeStatus]:
        with slots.locked(self.root):
            slots.write_capacity(self.root, self._capacity())
            free = slots.free(self._capacity(), slots.alive(self.root))
            order = slots.drained(self.root)
        cpus_used, gpus_used = self.cpus - free["cpus"], len(self.gpus) - len(free["gpus"])
        busy = [gpu.index for gpu in self.gpus if gpu.index not in free["gpus"]]
        idle, full = not cpus_used and not gpus_used, cpus_used >= self.cpus
        state = "idle" if idle else "allocated" if full else "mixed"
        if order is not None:
            state = "drained" if idle else "draining"
        node = NodeStatus(
            name=shim.node_names(1)[0],
            state=state,
            reason=order["reason"] if order else "",
            reason_by=order["by"] if order else "",
            reason_at=order["at"] if order else None,
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

    def queue(self) -> Listing[QueuedJob]:
        with slots.locked(self.root):
            jobs = slots.alive(self.root)
        return Listing(job_queue.described(self.root, jobs, user=self.user))

    def partitions(self) -> Listing[Partition]:
        only = Partition(name=job_queue.PARTITION, is_default=True, nodes=(shim.node_names(1)[0],))
        return Listing([only])

    def reservations(self) -> Listing[Reservation]:
        return Listing()

    def licenses(self) -> Listing[License]:
        return Listing()

    def clock(self) -> None:
        """Return None: it runs on the worker's machine."""

    def accounts(self) -> Accounts:
        return Accounts()

    def drain(self, node: str, reason: str) -> None:
        self._check_name(node)
        with self._noting(), slots.locked(self.root):
            slots.drain(self.root, reason=reason, by=pwd.getpwuid(os.geteuid()).pw_name)

    def undrain(self, node: str) -> None:
        self._check_name(node)
        with self._noting(), slots.locked(self.root):
            if slots.drained(self.root) is None:
                raise SchedulerError(f"{node} is not drained: there is nothing to undo.", permanent=True)
            slots.undrain(self.root, self._capacity())

    def _check_name(self, node: str) -> None:
        here = shim.node_names(1)[0]
        if node != here:
            raise SchedulerError(f"{node} is no node of this scheduler's: its only one is {here}.", permanent=True)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """A disk that takes nothing just now is no refusal: the order is carried out once it does."""
        try:
            yield
        except OSError as error:
            raise SchedulerError(
                f"Nothing can be written to {self.root}: {error.strerror}. Make room there."
            ) from error

    def _check(self, submission: Submission) -> None:
        """Refuse what could never start."""
        nodes = submission.min_nodes
        for what, asked, there in (
            ("CPUs", submission.cpus_per_node * nodes, self.cpus),
            ("GPUs", submission.gpus_per_node * nodes, len(self.gpus)),
            ("MiB of memory", (submission.memory_mib_per_node or 0) * nodes, self.memory_mib),
        ):
            if asked > there:
                message = f"{asked:,} {what} are asked for and this machine has {there:,}. Ask for less."
                raise SchedulerError(message, permanent=True)

    def _capacity(self) -> slots.Facts:
        return {"cpus": self.cpus, "gpus": [gpu.index for gpu in self.gpus], "memory_mib": self.memory_mib}

    def _known(self, key: str) -> int | None:
        try:
            return int(os.readlink(self._key(key)))
        except FileNotFoundError:
            return None

    def _key(self, key: str) -> str:
        if not key.isalnum():
            raise SchedulerError(f"{key!r} cannot be a key.", permanent=True)
        return os.path.join(self.root, "keys", key)

    def _write_request(self, submission: Submission) -> int:
        """A folder for the next id, whole before the key leads to it; under the lock."""
        used = slots.job_ids(self.root)
        last = slots.read_json(os.path.join(self.root, "last.json")) or {"id": 0}
        job_id: int = max([last["id"], *used]) + 1
        slots.write_json(os.path.join(self.root, "last.json"), {"id": job_id})
        place = slots.folder(self.root, job_id)
        os.makedirs(os.path.join(place, "inbox"), mode=0o700)
        slots.write_json(os.path.join(place, "request.json"), self._request(submission))
        os.symlink(str(job_id), self._key(submission.key))
        if job_id % 50 == 0:
            self._prune(used)
        return job_id

    def _request(self, submission: Submission) -> slots.Facts:
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
                "min_nodes": submission.min_nodes,
                "max_nodes": submission.max_nodes,
            },
        }

    def _environment(self, user: Mapping[str, Any] | None) -> dict[str, str]:
        """A job's environment, by an allow list: the portal's secrets, database and broker are none of its business."""
        kept = {name: os.environ[name] for name in self.pass_on if name in os.environ}
        kept.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
        kept.setdefault("LANG", "C.UTF-8")
        if user is not None:
            kept |= {"USER": user["name"], "LOGNAME": user["name"], "HOME": user["home"], "SHELL": user["shell"]}
        return kept

    def _start(self, job_id: int) -> None:
        """Start the watcher, once; it detaches, and answers when it holds its lock."""
        place = slots.folder(self.root, job_id)
        if os.path.exists(os.path.join(place, "status.json")) or slots.is_held(os.path.join(place, "shim.lock")):
            return
        with open(os.path.join(place, "shim.log"), "ab") as log:
            try:
                done = subprocess.run(
                    [sys.executable, "-I", "-S", shim.__file__, place],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8"},
                    cwd="/",
                    timeout=START_WAIT_S,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise SchedulerError(f"The watcher of job {job_id} does not start: {error}") from error
        if done.returncode != 0:
            raise SchedulerError(f"The watcher of job {job_id} ended at once: {_tail(log.name)}")

    def _status(self, job_id: int) -> JobStatus | None:
        place = slots.folder(self.root, job_id)
        request = slots.read_json(os.path.join(place, "request.json"))
        if request is None:
            return None
        # Asked before the status is read: a shim that ends in between has written its last word by then.
        watched = slots.is_held(os.path.join(place, "shim.lock"))
        status = slots.read_json(os.path.join(place, "status.json"))
        if not watched and (status is None or status["state"] not in FINAL):
            status = self._settle(job_id, request)
        status = status or _starting(request)
        return JobStatus(scheduler_id=str(job_id), key=request["key"], **{**status, "nodes": tuple(status["nodes"])})

    def _settle(self, job_id: int, request: slots.Facts) -> slots.Facts | None:
        """A job that nobody watches: start what never was, end what a dead shim left, and say so."""
        place = slots.folder(self.root, job_id)
        if not os.path.exists(os.path.join(place, "shim.json")):
            if time.time() - request["submitted_at"] > START_WAIT_S:  # whoever submitted it died in between
                self._start(job_id)
            return None
        lock = shim.hold(os.path.join(place, "shim.lock"))
        if lock is None:
            return slots.read_json(os.path.join(place, "status.json"))
        try:
            status = slots.read_json(os.path.join(place, "status.json"))
            if status is not None and status["state"] in FINAL:
                return status
            return self._bury(job_id, place, status or _starting(request))
        finally:
            os.close(lock)

    def _bury(self, job_id: int, place: str, status: slots.Facts) -> slots.Facts:
        """End what the dead shim's job left behind, then write its last word."""
        known = slots.read_json(os.path.join(place, "shim.json")) or {}
        here = known.get("boot_id") == processes.boot_id()
        deadline = time.monotonic() + 5
        while here and processes.kill_marked("VIGIL_LOCAL_JOB", place):
            if time.monotonic() > deadline:
                return {**status, "state": "completing", "reason": "Some of its processes do not die."}
            time.sleep(0.02)
        reason = "Its watcher was killed, and everything of it ended." if here else "The machine was restarted."
        status = {**status, "state": "node_fail", "reason": reason, "ended_at": time.time()}
        slots.write_json(os.path.join(place, "status.json"), status)
        slots.give_back(self.root, job_id, for_good=True)
        return status

    def _tell(self, scheduler_id: str, word: str) -> None:
        """Leave a word in the inbox and wake the watcher; one that has ended is no error."""
        if not scheduler_id.isdecimal():
            raise SchedulerError(f"{scheduler_id!r} is not an id of this scheduler.", permanent=True)
        place = slots.folder(self.root, int(scheduler_id))
        status = self._status(int(scheduler_id))
        if status is None or status.state in FINAL:
            return
        with open(os.path.join(place, "inbox", f"{time.time_ns():020}-{word}"), "xb"):
            pass
        known = slots.read_json(os.path.join(place, "shim.json"))
        if known is not None and processes.is_same(known):
            try:
                os.kill(known["pid"], signal.SIGHUP)
            except ProcessLookupError:
                return

    def _prune(self, job_ids: list[int]) -> None:
        """Forget jobs that ended long ago."""
        for job_id in job_ids:
            place = slots.folder(self.root, job_id)
            status = slots.read_json(os.path.join(place, "status.json"))
            if status and status["state"] in FINAL and time.time() - (status["ended_at"] or 0) > KEEP_S:
                request = slots.read_json(os.path.join(place, "request.json"))
                shutil.rmtree(place, ignore_errors=True)
                if request is not None:
                    processes.remove_marker(self._key(request["key"]))


def _starting(request: slots.Facts) -> slots.Facts:
    """How a job stands before its watcher has said anything."""
    return {"state": "pending", "submitted_at": request["submitted_at"], "reason": "Starting", "nodes": []}


def _tail(path: str) -> str:
    with open(path, "rb") as file:
        return file.read()[-500:].decode(errors="replace").strip() or "it said nothing"
