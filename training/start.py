"""`python start.py RUN_DIR`: the launcher, by whatever interpreter a job has. batch.sh runs it, as a file.

It needs nothing installed but NEEDS: this file's own checkout is where `training` is found, by the ranks, too.
Kept readable for old Pythons, so that they can say that they are too old.

The launcher is a child of this process, and is started again where a signal ended it that nobody passed on.
"""

import ctypes
import os
import signal
import sys
import time

LEAST = (3, 11)
NEEDS = "torch, numpy, psutil and pydantic"
BAD_PLAN = 2
MOST_STARTS = 10  # of one that cannot live here; what it may cost the ranks is the launcher's own to count
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
CLEAR_SECONDS = 10.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> int:
    version = "%d.%d" % sys.version_info[:2]  # noqa: UP031
    if sys.version_info[:2] < LEAST:
        return _say("is Python %s; at least %d.%d is needed." % (version, *LEAST))  # noqa: UP031
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a launcher leaves behind becomes ours
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    for _ in range(MOST_STARTS):
        keeper = os.getpid()
        launcher = os.fork()
        if not launcher:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                return 128 + signal.SIGKILL
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return launch()
        code, was_asked = _follow(launcher)
        if code >= 0:
            return code
        _clear()
        if was_asked:
            break
        sys.stderr.write(f"The launcher was ended by signal {-code}.\n")
    return 128 - code


def launch() -> int:
    """The launcher, in this process."""
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[0] = checkout  # instead of training/, whose files have names of their own
    theirs = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([checkout, theirs] if theirs else [checkout])
    import runpy

    try:
        runpy.run_module("training.launch", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        name = (error.name or str(error)).partition(".")[0]
        return _say(f"has no {name}. Install {NEEDS} there.")
    return 0


def _follow(launcher: int) -> "tuple[int, bool]":
    """Its exit code, negative for a signal, and whether we were sent one, which Slurm sends to both of us."""
    was_asked = False
    while True:
        number = signal.sigwait({*PASSED_ON, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            was_asked = True
            os.kill(launcher, number)
            continue
        ended, status = os.waitpid(launcher, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), was_asked


def _clear() -> None:
    """End whatever a killed launcher has left: what its ranks had started, say."""
    until = time.monotonic() + CLEAR_SECONDS  # nobody can help a process in uninterruptible sleep
    while time.monotonic() < until:
        for child in _children():
            os.kill(child, signal.SIGKILL)  # it is there, if only to be waited for: nobody else does
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _children() -> "list[int]":
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:  # a kernel without
        return []


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _say(what: str) -> int:
    sentence = f"The job's Python, {sys.executable}, {what} Or name another under [environment].\n"
    sys.stderr.write(sentence)
    job = os.environ.get("VIGIL_SCHEDULER_ID") or os.environ.get("SLURM_JOB_ID", "")
    name = "{}.{}".format(job, os.environ.get("SLURM_RESTART_COUNT") or "0")
    told = os.path.join(sys.argv[1] if len(sys.argv) > 1 else "", "job", "told", name)
    if os.path.isdir(told):  # where the portal looks for what came before any launcher
        with open(os.path.join(told, "failed"), "w") as file:
            file.write(sentence)
    return BAD_PLAN


if __name__ == "__main__":
    sys.exit(main())
