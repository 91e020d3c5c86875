"""Start, find and kill all processes of one local job, also as another user.

Standard library only and quick to import: the shim imports it.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Adopt orphaned descendants as our children, so that none escapes."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel SIGKILL us when our parent ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def start_time(pid: int) -> int | None:
    """Return the process's start in clock ticks since boot; None if it is gone.

    Together with the boot id this distinguishes a process from a later one with the same pid.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def identity(pid: int) -> dict[str, Any]:
    return {"pid": pid, "start_time": start_time(pid), "boot_id": boot_id()}


def is_same(recorded: Mapping[str, Any] | None) -> bool:
    """Return whether the recorded process still is the one with that pid."""
    if not recorded or recorded.get("boot_id") != boot_id():
        return False
    return recorded.get("start_time") == start_time(recorded["pid"])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on (state, parent, …).

    The name before them may contain anything, parentheses too.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _live_processes() -> Iterator[tuple[int, int]]:
    """Yield (pid, parent pid) of every process that has not ended."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) and fields[0] not in {"Z", "X"}:
            yield int(name), int(fields[1])


def descendants(root: int | None = None) -> list[int]:
    """Return the pid of every living process below `root`, or below this one."""
    children: dict[int, list[int]] = {}
    for pid, parent in _live_processes():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    todo = list(children.get(os.getpid() if root is None else root, []))
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def signal_descendants(number: signal.Signals) -> bool:
    """Signal every process below us; return whether there was any."""
    found = descendants()
    for pid in found:
        _kill(pid, number)
    return bool(found)


def kill_descendants() -> bool:
    """SIGKILL every process below us; return whether there was any."""
    return signal_descendants(signal.SIGKILL)


def kill_marked(variable: str, value: str) -> bool:
    """SIGKILL every process with this variable in its environment; return whether there was any."""
    wanted = f"{variable}={value}".encode()
    found = False
    for pid, _ in _live_processes():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = wanted in file.read().split(b"\0")
        except OSError:  # ended, or another user's
            continue
        if marked and pid != os.getpid():
            found = True
            _kill(pid, signal.SIGKILL)
    return found


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def reaped() -> Iterator[tuple[int, int]]:
    """Reap every child that has ended; yield (pid, wait status)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def spawn(
    command: list[str],
    *,
    environment: Mapping[str, str],
    directory: str,
    output: str,
    user: Mapping[str, Any] | None = None,
) -> tuple[int | None, str]:
    """Start a process that dies with us, as `user` if given; return (pid, "") or (None, why it failed).

    Working directory and output are opened as that user, so a planted symlink reaches nothing that the user cannot.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _exec_as(command, environment, directory, output, user)
        except BaseException as error:
            os.write(writing, str(error).encode()[:4000])
        finally:
            os._exit(126)
    os.close(writing)
    with open(reading, "rb") as file:
        problem = file.read().decode(errors="replace")
    if problem:
        os.waitpid(pid, 0)
        return None, f"Could not be started: {problem}"
    return pid, ""


def _exec_as(
    command: list[str], environment: Mapping[str, str], directory: str, output: str, user: Mapping[str, Any] | None
) -> None:
    os.setsid()
    if user is not None:
        os.setgroups(user["groups"])
        os.setgid(user["gid"])
        os.setuid(user["uid"])
    die_with_parent()  # after setuid, which forgets it
    os.umask(0o027)
    os.chdir(directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    os.dup2(os.open(output, flags, 0o640), 1)
    os.dup2(1, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Python ignores some signals and the portal's parent perhaps others; a shell cannot trap a signal ignored at entry.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.execve(command[0], command, dict(environment))


def remove_marker(path: str) -> bool:
    """Delete a job's marker file; return whether it existed. Only its name counts, it is never opened."""
    try:
        os.unlink(path)
    except (FileNotFoundError, IsADirectoryError, PermissionError, NotADirectoryError):
        return False
    return True


def out_of_memory_kills() -> int:
    """Return how many processes the kernel's OOM killer has killed since boot."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            lines = (line.split() for line in file)
            return next((int(words[1]) for words in lines if words[0] == "oom_kill"), 0)
    except OSError:
        return 0
