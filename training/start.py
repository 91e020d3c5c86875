"""`python start.py RUN_DIR`: run the launcher with whatever interpreter a job has. batch.sh runs it, as a file.

Only NEEDS must be installed: `training` is found in this file's own checkout, by the ranks, too. The code is readable
for old Pythons, so that they can report that they are too old.

The launcher is a child of this process, which restarts it if it was ended by a signal that was not passed on.
"""

import ctypes
import os
import signal
import sys
import time

MIN_VERSION = (3, 11)
NEEDS = "torch, numpy, psutil and pydantic"
BAD_PLAN = 2
MAX_STARTS = 10  # of a launcher that cannot run here; the launcher itself counts restarts of the ranks
FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
CLEAR_SECONDS = 10.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> int:
    version = "%d.%d" % sys.version_info[:2]  # noqa: UP031
    if sys.version_info[:2] < MIN_VERSION:
        return _report_problem("is Python %s; Vigil needs %d.%d or later. Install it," % (version, *MIN_VERSION))  # noqa: UP031
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # adopt processes that a launcher leaves behind
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    for _ in range(MAX_STARTS):
        parent = os.getpid()
        launcher = os.fork()
        if not launcher:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                return 128 + signal.SIGKILL
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return launch()
        code, was_signalled = _follow(launcher)
        if code >= 0:
            return code
        _kill_leftovers()
        if was_signalled:
            break
        sys.stderr.write(f"The launcher was ended by signal {-code}.\n")
    return 128 - code


def launch() -> int:
    """Run the launcher in this process."""
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[0] = checkout  # instead of training/, whose files would shadow other modules
    user_path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([checkout, user_path] if user_path else [checkout])
    import runpy

    try:
        runpy.run_module("training.launch", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        name = (error.name or str(error)).partition(".")[0]
        return _report_problem(f"has no {name}. Install {NEEDS} there,")
    return 0


def _follow(launcher: int) -> "tuple[int, bool]":
    """Return the launcher's exit code, negative for a signal, and whether we received a signal.

    Slurm sends its signals to both processes.
    """
    was_signalled = False
    while True:
        number = signal.sigwait({*FORWARDED, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            was_signalled = True
            os.kill(launcher, number)
            continue
        ended, status = os.waitpid(launcher, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), was_signalled


def _kill_leftovers() -> None:
    """Kill whatever a killed launcher has left, such as processes started by its ranks."""
    until = time.monotonic() + CLEAR_SECONDS  # a process in uninterruptible sleep cannot be killed
    while time.monotonic() < until:
        for child in _children():
            os.kill(child, signal.SIGKILL)  # the process exists, at least as a zombie, as nobody else reaps it
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
    except OSError:  # a kernel without this file
        return []


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _report_problem(what: str) -> int:
    sentence = f"The job's Python, {sys.executable}, {what} or name another interpreter under [environment].\n"
    sys.stderr.write(sentence)
    job = os.environ.get("VIGIL_SCHEDULER_ID") or os.environ.get("SLURM_JOB_ID", "")
    name = "{}.{}".format(job, os.environ.get("SLURM_RESTART_COUNT") or "0")
    folder = os.path.join(sys.argv[1] if len(sys.argv) > 1 else "", "job", "told", name)
    if os.path.isdir(folder):  # where the portal reads errors from before the launcher
        with open(os.path.join(folder, "failed"), "w") as file:
            file.write(sentence)
    return BAD_PLAN


if __name__ == "__main__":
    sys.exit(main())
