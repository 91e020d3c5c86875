"""The watcher of one local job: waits for its turn, runs batch.sh, keeps its time limit, tells the end.

Run as `python -I -S shim.py FOLDER`; standard library only, so that it stands within milliseconds. It is its own
session, no child of the portal, and reaps whatever its job leaves behind. The portal may be gone: nothing here asks it.

    request.json   what was asked for (written before the shim starts)
    shim.lock      an flock held for life, on a local disk: free means dead
    shim.json      pid, start time and boot id, to signal the right process
    status.json    how it stands, replaced whole
    inbox/         <time>-<WORD>: TERM, USR1, KILL for the batch script, CANCEL to end everything; SIGHUP says "look"
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
LOOK_S = 1.0  # how often an inbox is looked through without being told to
WAKE = {signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}


class Shim:
    """One job, from its place in the queue to its last word."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.root = os.path.dirname(os.path.dirname(folder))
        self.job_id = int(os.path.basename(folder))
        self.request = slots.read_json(os.path.join(folder, "request.json")) or {}
        self.cancelled = False
        self.unwritten = False
        self.status: slots.Facts = {
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

    def live(self) -> None:
        """Queue, run, and queue again for as long as the job asks to be requeued."""
        while (granted := self.wait_for_turn()) is not None:
            run = Run(self, granted)
            run.watch()
            run.end_everything()
            if not run.wants_requeue():
                self.end(**run.outcome())
                return
            slots.give_back(self.root, self.job_id, for_good=False)
            count = self.status["restart_count"] + 1
            self.note(state="pending", reason="Requeued", restart_count=count, started_at=None, nodes=[])
        self.end(state="cancelled", reason="Cancelled while it waited.")

    def wait_for_turn(self) -> slots.Facts | None:
        """The slots, once it is this job's turn and they are free; None if it is cancelled first."""
        seen, looked = -1, 0.0
        while True:
            self.read_inbox(None)
            if self.cancelled:
                return None
            now, changed = time.monotonic(), slots.changed_at(self.root)
            if changed != seen or now - looked > 2:  # the clock heals a shim that died without giving back
                seen, looked = changed, now
                try:
                    granted, reason = slots.take(self.root, self.job_id)
                except OSError as error:  # a full disk: slots that cannot be written down are not taken
                    granted, reason = None, f"Resources ({error.strerror})"
                if granted is not None:
                    return granted
                if reason != self.status["reason"]:
                    self.note(reason=reason)
            signal.sigtimedwait(WAKE, 0.1)

    def read_inbox(self, run: Run | None) -> None:
        """Do what was asked since the last look, in order."""
        inbox = os.path.join(self.folder, "inbox")
        for name in sorted(os.listdir(inbox)):
            word = name.rpartition("-")[2]
            if word == "CANCEL":
                self.cancelled = True
            elif run is not None and word in {"TERM", "USR1", "KILL"}:
                run.signal(getattr(signal, f"SIG{word}"))
            os.unlink(os.path.join(inbox, name))

    def note(self, **changes: object) -> None:
        """Write how it stands. A full disk must not end the job: what could not be written is tried again."""
        self.status.update(changes)
        self.unwritten = True
        self.write()

    def write(self) -> None:
        if not self.unwritten:
            return
        try:
            slots.write_json(os.path.join(self.folder, "status.json"), self.status)
        except OSError:
            return
        self.unwritten = False

    def end(self, **changes: object) -> None:
        """The last word, on disk before the slots are free."""
        self.note(ended_at=time.time(), **changes)
        while self.unwritten:
            time.sleep(LOOK_S)
            self.write()
        slots.give_back(self.root, self.job_id, for_good=True)


class Run:
    """One start of the batch script."""

    def __init__(self, shim: Shim, granted: slots.Facts) -> None:
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
        shim.note(state="running", reason="", started_at=time.time(), nodes=self.names)

    def _start(self, granted: slots.Facts) -> int | None:
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
        """Pass signals on, keep the time limit and obey a cancel until the batch script has ended."""
        limit, lead = self.request["time_limit_s"], self.request["grace_s"]
        while self.pid is not None and self.wait_status is None:
            ran = time.monotonic() - self.start
            if not self.warned and ran >= limit - lead:
                self.warned = True
                self.signal(signal.SIGUSR1)
            if not self.timed_out and ran >= limit:
                self.timed_out = True
                processes.signal_descendants(signal.SIGTERM)
            if self.shim.cancelled or (self.timed_out and ran >= limit + KILL_WAIT_S):
                self.killed = True
                return
            coming = limit - lead if not self.warned else limit if not self.timed_out else limit + KILL_WAIT_S
            signal.sigtimedwait(WAKE, min(LOOK_S, max(0.01, coming - ran)))
            self.reap()
            self.shim.read_inbox(self)
            self.shim.write()

    def reap(self) -> None:
        """Collect what has ended; orphans of the job come to us as its subreaper."""
        for pid, status in processes.reaped():
            if pid == self.pid:
                self.wait_status = status

    def signal(self, number: signal.Signals) -> None:
        """Signal the batch script alone, as Slurm's --signal=B: does."""
        if self.pid is not None and self.wait_status is None:
            os.kill(self.pid, number)

    def end_everything(self) -> None:
        """SIGKILL whatever is left of the job, until nothing is: only then has it ended."""
        noted = False
        started = time.monotonic()
        while processes.kill_descendants():
            self.reap()
            if not noted and time.monotonic() - started > 2:
                self.shim.note(state="completing", reason="Some of its processes do not die.")
                noted = True
            signal.sigtimedwait(WAKE, 0.02 if not noted else 0.5)
        self.reap()

    def wants_requeue(self) -> bool:
        """Whether the batch script called `scontrol requeue` and nothing speaks against it."""
        self.shim.read_inbox(None)
        asked = processes.remove_marker(self.requeue_marker)
        return asked and not self.timed_out and not self.shim.cancelled

    def outcome(self) -> slots.Facts:
        """Slurm's word for how it ended, its exit code or signal, and a reason where there is more to say."""
        if self.pid is None:
            return {"state": "failed", "exit_code": 126, "reason": self.problem}
        status = self.wait_status or 0
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        ended: slots.Facts = {"exit_code": code, "signal": number, "reason": ""}
        if self.shim.cancelled:
            return {**ended, "state": "cancelled"}
        if self.timed_out:
            return {**ended, "state": "timeout", "reason": "It reached its time limit."}
        if code == 0:
            return {**ended, "state": "completed"}
        if (code == 137 or number == signal.SIGKILL) and processes.out_of_memory_kills() > self.kills_before:
            reason = "The kernel killed a process for want of memory while it ran."
            return {**ended, "state": "out_of_memory", "reason": reason}
        return {**ended, "state": "failed"}


def node_names(count: int) -> list[str]:
    """This machine's name, or one name for each node that it plays."""
    name = os.uname().nodename.split(".")[0]
    return [name] if count == 1 else [f"{name}-{index}" for index in range(count)]


def slurm_variables(shim: Shim, granted: slots.Facts, names: list[str]) -> dict[str, str]:
    """What Slurm tells a batch script, as far as ours relies on it; and where srun and scontrol of ours are."""
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
    """Detach; answer 0 as soon as the watcher holds the lock, so that nobody ever sees the job without one."""
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
    descriptor = hold(os.path.join(folder, "shim.lock"))
    if descriptor is None or os.path.exists(os.path.join(folder, "status.json")):
        os.write(writing, b"1" if descriptor is None else b"0")  # somebody watches it already, or it had its life
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, WAKE)
    processes.become_subreaper()
    shim = Shim(folder)
    slots.write_json(os.path.join(folder, "shim.json"), processes.identity(os.getpid()))
    slots.write_json(slots.ticket_path(shim.root, shim.job_id), shim.request["ticket"])
    shim.note()
    os.write(writing, b"1")
    os.close(writing)
    shim.live()
    return 0


def hold(path: str) -> int | None:
    """The lock for life, or None if another shim has it; somebody who only looks holds it for an instant."""
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
