"""A room: this machine with another folder as its /usr, visible only to the processes that entered it.

Everything else (the checkout, temporary files, users, devices, the network) is the machine's own, at its own path. Run
as a program, this file is the room's keeper: it lives as long as its standard input is open, and on exit kills every
process in the room, even daemons and jobs, so that nothing outlives a killed test. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000


class Room:
    """A room and its keeper. `enter(command)` returns the command line that runs a command in it."""

    def __init__(self, usr: Path, ld_cache: Path, *, visible: Sequence[Path] = ()) -> None:
        self.keeper = subprocess.Popen(
            [sys.executable, "-I", __file__, "keep", str(usr), str(ld_cache), *map(str, visible)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self.keeper.stdout
        if self.keeper.stdout.readline() != b"ready\n":
            raise AssertionError(f"no room could be made; its keeper ended with {self.keeper.wait()}")
        self.mark = _namespace(self.keeper.pid)

    def enter(self, *command: str | Path, folder: Path = Path("/")) -> list[str]:
        return ["nsenter", f"--mount=/proc/{self.keeper.pid}/ns/mnt", f"--wdns={folder}", "--", *map(str, command)]

    @property
    def command_prefix(self) -> str:
        """Return the same as a shell command line that stays in its folder."""
        return f'nsenter --mount=/proc/{self.keeper.pid}/ns/mnt --wdns="$PWD" --'

    def members(self) -> list[int]:
        return members(self.mark, besides=self.keeper.pid)

    def close(self) -> None:
        """End every process in it."""
        self.keeper.communicate()


def members(mark: str, besides: int = 0) -> list[int]:
    """Return the room's processes with that mark."""
    everybody = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in everybody if pid != besides and _namespace(pid) == mark]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:  # gone, or a zombie
        return ""


def _keep(usr: Path, ld_cache: Path, visible: Sequence[Path]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
    _furnish(usr, ld_cache, visible)
    os.write(1, b"ready\n")
    while os.read(0, 4096):
        pass
    mark = _namespace(os.getpid())
    while left := members(mark, besides=os.getpid()):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def _furnish(usr: Path, ld_cache: Path, visible: Sequence[Path]) -> None:
    base = Path(sys.base_prefix)
    if base == Path("/usr"):
        _bring_python(usr)
    else:
        visible = [*visible, base]
    _bind(ld_cache, Path("/etc/ld.so.cache"))
    _bind(Path("/usr/local"), usr / "local")
    _bind(usr, Path("/usr"))
    _open_ways(visible)


def _bring_python(usr: Path) -> None:
    """Mount the machine's own Python, which the other /usr would hide."""
    library = Path(f"lib/python{sys.version_info.major}.{sys.version_info.minor}")
    _bind("/usr" / library, usr / library)
    program = Path(os.path.realpath(sys.executable))
    for name in {program.name, "python3"}:
        _bind(program, usr / "bin" / name)


def _open_ways(visible: Sequence[Path]) -> None:
    """Let every user reach these paths: cover a closed parent folder (often /root) with one that has only this path."""
    ways: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(visible):
        if closed := next((p for p in reversed(path.parents) if not p.stat().st_mode & stat.S_IXOTH), None):
            ways.setdefault(closed, []).append(path)
    for closed, paths in ways.items():
        handles = {path: os.open(path, os.O_PATH) for path in paths}
        _call("mount", b"none", os.fsencode(closed), b"tmpfs", 0, b"mode=711,size=1m")
        for path, handle in handles.items():
            _bind(Path(f"/proc/self/fd/{handle}"), path)
            os.close(handle)


def _bind(source: Path, target: Path) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.touch()
    _call("mount", os.fsencode(source), os.fsencode(target), None, _MS_BIND | _MS_REC, None)


def _call(function: str, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}", str(arguments))


def _become(name: str, command: Sequence[str]) -> None:
    """Run a command as another user who can reach our Python, with the machine's own /usr."""
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
    here = os.getcwd()
    _open_ways([Path(__file__).parents[2], Path(sys.base_prefix)])
    with contextlib.suppress(OSError):  # a folder that is covered now
        os.chdir(here)
    os.execvp("setpriv", as_user(name, *command))


def as_user(name: str, *command: str | Path) -> list[str]:
    """Return the command line that switches from root to a user. `keep`: the switch would clear the death signal."""
    gid = pwd.getpwnam(name).pw_gid
    identity = [f"--reuid={name}", f"--regid={gid}", "--init-groups", "--inh-caps=-all", "--pdeathsig=keep"]
    return ["setpriv", *identity, "--", *map(str, command)]


def main() -> None:
    """keep USR LD_CACHE [VISIBLE …] | as USER COMMAND …"""
    what, *words = sys.argv[1:]
    if what == "as":
        _become(words[0], words[1:])
    else:
        usr, ld_cache, *visible = map(Path, words)
        _keep(usr, ld_cache, visible)


if __name__ == "__main__":
    main()
