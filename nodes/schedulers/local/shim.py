"""Watch one local job: wait for its turn, run batch.sh, enforce its time limit, record how it ended.

Run as `python -I -S shim.py FOLDER`; standard library only, so that it starts within milliseconds. It has its own
session, is not a child of the portal, and reaps whatever its job leaves behind. It never contacts the portal, which
may be gone.

    request.json   the submission (written before the shim starts)
    shim.lock      an flock for the shim's lifetime, on a local disk: free means the shim is dead
    shim.json      pid, start time and boot id, to signal the right process
    status.json    the job's status, replaced atomically
    inbox/         <time>-<WORD>: TERM, USR1, KILL for the batch script, CANCEL to end everything; SIGHUP wakes the shim
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time

if __name__ == "__main__":  # isolated mode leaves the path to us
    sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from nodes.schedulers.local import processes, slots

KILL_WAIT_S = 5.0  # between SIGTERM at the time limit and SIGKILL
POLL_S = 1.0  # how often the inbox is read without a SIGHUP
WAKE = {signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}


class Shim:
    """Manage one job from its place in the queue to its final status."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.root = os.path.dirname(os.path.dirname(folder))
        self.job_id = int(os.path.basename(folder))
        self.request = slots.read_json(os.path.join(folder, "request.json")) or {}
        self.cancelled = False
        self.has_unwritten_status = False
        self.status: slots.JsonObject = {
            "state": "pending",
            "reason": "",
            "restart_count": 0,
            "submitted_at": self.request["submitted_at"],
            "started_at": None,
            "ended_at": None,
            "exit_code": None,
            "signal": None,
            "nodes": [],
        }

    def run(self) -> None:
        """Wait for a turn and run the job; repeat for as long as the job requests a requeue."""
        while (granted := self.wait_for_turn()) is not None:
            run = BatchRun(self, granted)
            run.watch()
            run.end_everything()
            if not run.wants_requeue():
                self.finish(**run.outcome())
                return
            slots.release(self.root, self.job_id, for_good=False)
            count = self.status["restart_count"] + 1
            self.update_status(state="pending", reason="Requeued", restart_count=count, started_at=None, nodes=[])
        self.finish(state="cancelled", reason="Cancelled while pending.")

    def wait_for_turn(self) -> slots.JsonObject | None:
        """Return the slots once it is this job's turn and they are free; None if it is cancelled first."""
        last_change, checked_at = -1, 0.0
        while True:
            self.read_inbox(None)
            if self.cancelled:
                return None
            now, changed = time.monotonic(), slots.changed_at(self.root)
            if changed != last_change or now - checked_at > 2:  # a shim may have died with its slots
                last_change, checked_at = changed, now
                try:
                    granted, reason = slots.take(self.root, self.job_id)
                except OSError as error:  # a full disk: slots that cannot be recorded are not taken
                    granted, reason = None, f"Resources ({error.strerror})"
                if granted is not None:
                    return granted
                if reason != self.status["reason"]:
                    self.update_status(reason=reason)
            signal.sigtimedwait(WAKE, 0.1)

    def read_inbox(self, run: BatchRun | None) -> None:
        """Carry out the commands that arrived since the last call, in order."""
        inbox = os.path.join(self.folder, "inbox")
        for name in sorted(os.listdir(inbox)):
            command = name.rpartition("-")[2]
            if command == "CANCEL":
                self.cancelled = True
            elif run is not None and command in {"TERM", "USR1", "KILL"}:
                run.signal(getattr(signal, f"SIG{command}"))
            os.unlink(os.path.join(inbox, name))

    def update_status(self, **changes: object) -> None:
        """Update the status and write it. A full disk must not end the job: a failed write is retried."""
        self.status.update(changes)
        self.has_unwritten_status = True
        self.write_status()

    def write_status(self) -> None:
        if not self.has_unwritten_status:
            return
        try:
            slots.write_json(os.path.join(self.folder, "status.json"), self.status)
        except OSError:
            return
        self.has_unwritten_status = False

    def finish(self, **changes: object) -> None:
        """Write the final status to disk, then free the slots."""
        self.update_status(ended_at=time.time(), **changes)
        while self.has_unwritten_status:
            time.sleep(POLL_S)
            self.write_status()
        slots.release(self.root, self.job_id, for_good=True)


class BatchRun:
    """A single execution of the batch script."""

    def __init__(self, shim: Shim, granted: slots.JsonObject) -> None:
        self.shim, self.request = shim, shim.request
        self.requeue_marker = f"{self.request['output']}.requeue"
        self.kills_before = processes.out_of_memory_kills()
        self.killed = False
        self.timed_out = False
        self.warned = False
        self.wait_status: int | None = None
        self.problem = ""
        self.names = node_names(granted["nodes"])
        self.start = time.monotonic()
        processes.remove_marker(self.requeue_marker)
        self.pid = self._start(granted)
        shim.update_status(state="running", reason="", started_at=time.time(), nodes=self.names)

    def _start(self, granted: slots.JsonObject) -> int | None:
        environment = {**self.request["environment"], **slurm_variables(self.shim, granted, self.names)}
        pid, self.problem = processes.spawn(
            ["/bin/bash", self.request["script"]],
            environment=environment,
            directory=self.request["directory"],
            output=self.request["output"],
            user=self.request.get("user"),
        )
        return pid

    def watch(self) -> None:
        """Forward signals, enforce the time limit and obey a cancel until the batch script has ended."""
        limit, lead = self.request["time_limit_s"], self.request["grace_s"]
        while self.pid is not None and self.wait_status is None:
            elapsed = time.monotonic() - self.start
            if not self.warned and elapsed >= limit - lead:
                self.warned = True
                self.signal(signal.SIGUSR1)
            if not self.timed_out and elapsed >= limit:
                self.timed_out = True
                processes.signal_descendants(signal.SIGTERM)
            if self.shim.cancelled or (self.timed_out and elapsed >= limit + KILL_WAIT_S):
                self.killed = True
                return
            next_event_s = limit - lead if not self.warned else limit if not self.timed_out else limit + KILL_WAIT_S
            signal.sigtimedwait(WAKE, min(POLL_S, max(0.01, next_event_s - elapsed)))
            self.reap()
            self.shim.read_inbox(self)
            self.shim.write_status()

    def reap(self) -> None:
        """Reap ended processes. As the job's subreaper we receive its orphans too."""
        for pid, status in processes.reaped():
            if pid == self.pid:
                self.wait_status = status

    def signal(self, number: signal.Signals) -> None:
        """Signal only the batch script, like Slurm's --signal=B:."""
        if self.pid is not None and self.wait_status is None:
            os.kill(self.pid, number)

    def end_everything(self) -> None:
        """SIGKILL the job's remaining processes until there are none: only then has it ended."""
        is_noted = False
        started = time.monotonic()
        while processes.kill_descendants():
            self.reap()
            if not is_noted and time.monotonic() - started > 2:
                self.shim.update_status(state="completing", reason="Some of its processes cannot be killed.")
                is_noted = True
            signal.sigtimedwait(WAKE, 0.02 if not is_noted else 0.5)
        self.reap()

    def wants_requeue(self) -> bool:
        """Return whether the batch script called `scontrol requeue` and neither limit nor cancel forbids it."""
        self.shim.read_inbox(None)
        requested = processes.remove_marker(self.requeue_marker)
        return requested and not self.timed_out and not self.shim.cancelled

    def outcome(self) -> slots.JsonObject:
        """Return Slurm's state for how it ended, its exit code or signal, and a reason where one is known."""
        if self.pid is None:
            return {"state": "failed", "exit_code": 126, "reason": self.problem}
        status = self.wait_status or 0
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        outcome: slots.JsonObject = {"exit_code": code, "signal": number, "reason": ""}
        if self.shim.cancelled:
            return {**outcome, "state": "cancelled"}
        if self.timed_out:
            return {**outcome, "state": "timeout", "reason": "Time limit reached."}
        if code == 0:
            return {**outcome, "state": "completed"}
        if (code == 137 or number == signal.SIGKILL) and processes.out_of_memory_kills() > self.kills_before:
            reason = "The kernel's OOM killer killed a process while it ran."
            return {**outcome, "state": "out_of_memory", "reason": reason}
        return {**outcome, "state": "failed"}


def node_names(count: int) -> list[str]:
    """Return this machine's name, or one name per node that it stands for."""
    name = os.uname().nodename.split(".")[0]
    return [name] if count == 1 else [f"{name}-{index}" for index in range(count)]


def slurm_variables(shim: Shim, granted: slots.JsonObject, names: list[str]) -> dict[str, str]:
    """Return the Slurm variables that batch.sh relies on, with our srun and scontrol first in PATH."""
    request, count = shim.request, shim.status["restart_count"]
    bin_folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "localbin")
    variables = {
        "SLURM_JOB_ID": str(shim.job_id),
        "SLURM_JOBID": str(shim.job_id),
        "SLURM_JOB_NAME": request["name"],
        "SLURM_NNODES": str(granted["nodes"]),
        "SLURM_JOB_NUM_NODES": str(granted["nodes"]),
        "SLURM_JOB_NODELIST": ",".join(names),
        "SLURM_CPUS_ON_NODE": str(granted["cpus"] // granted["nodes"]),
        "SLURM_SUBMIT_DIR": request["directory"],
        "SLURMD_NODENAME": names[0],
        "CUDA_VISIBLE_DEVICES": ",".join(granted["gpus"]),
        "VIGIL_LOCAL_JOB": shim.folder,
        "VIGIL_LOCAL_PYTHON": sys.executable,
        "VIGIL_LOCAL_REQUEUE": f"{request['output']}.requeue",
        "PATH": f"{bin_folder}:{request['environment'].get('PATH', '/usr/local/bin:/usr/bin:/bin')}",
    }
    if count:
        variables["SLURM_RESTART_COUNT"] = str(count)
    return variables


def main(folder: str) -> int:
    """Detach, and return 0 as soon as the watcher has its lock: no one can observe the job without one."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return 0 if os.read(reading, 1) == b"1" else 1
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(reading)
    os.chdir("/")
    os.umask(0o077)
    descriptor = take_lock(os.path.join(folder, "shim.lock"))
    if descriptor is None or os.path.exists(os.path.join(folder, "status.json")):
        os.write(writing, b"1" if descriptor is None else b"0")  # it already has a watcher, or it has ended
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, WAKE)
    processes.become_subreaper()
    shim = Shim(folder)
    slots.write_json(os.path.join(folder, "shim.json"), processes.identity(os.getpid()))
    slots.write_json(slots.ticket_path(shim.root, shim.job_id), shim.request["ticket"])
    shim.update_status()
    os.write(writing, b"1")
    os.close(writing)
    shim.run()
    return 0


def take_lock(path: str) -> int | None:
    """Take the lock for our lifetime and return its descriptor; None if another shim has it.

    Retries for a second, because a process that only checks the lock takes it for an instant.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(100):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return descriptor
    return None


if __name__ == "__main__":
    raise SystemExit(main(os.path.abspath(sys.argv[1])))
