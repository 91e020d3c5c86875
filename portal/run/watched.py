"""Run one service under a watcher, for systemd units and containers, which restart only processes that have ended.

    python -m portal.run.watched python -m console.worker follow

Signals are passed on, and it exits as its service does. A service without a heartbeat for VIGIL_UNRESPONSIVE_SECONDS is
killed, and this exits with 1, so that systemd (`Restart=always`) or the container engine restarts it. As a container's
first process it also reaps orphaned processes. Imports no Django.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from portal.run.child import die_with
from portal.run.heartbeat import FILE, INTERVAL_S, STACKS, Watch

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STACKS_S = 1.0  # time to write its stacks before it is killed


def main(command: Sequence[str]) -> int:
    if not command:
        print("usage: python -m portal.run.watched COMMAND …", file=sys.stderr)
        return 2
    from portal.settings import VIGIL_UNRESPONSIVE_SECONDS as limit_s

    with tempfile.TemporaryDirectory(prefix="vigil-") as folder:
        return _watch(command, Watch(limit_s, Path(folder) / "heartbeat"))


def _watch(command: Sequence[str], watch: Watch) -> int:
    parent = os.getpid()
    environment = {**os.environ, FILE: str(watch.path)}
    # Blocked first, so that no signal arrives between the start and the handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, [*PASSED_ON, signal.SIGCHLD])
    service = subprocess.Popen(command, env=environment, preexec_fn=lambda: _prepare(parent))
    watch.restart()
    while True:
        info = signal.sigtimedwait([*PASSED_ON, signal.SIGCHLD], INTERVAL_S)
        if info is not None and info.si_signo != signal.SIGCHLD:
            with suppress(ProcessLookupError):
                os.kill(service.pid, info.si_signo)
        code = _reap(service.pid)
        if code is not None:
            service.returncode = code
            return code if code >= 0 else 128 - code
        if watch.is_over():
            print(f"{command[-1]} did not respond for {watch.limit_s:g} s and is killed", file=sys.stderr)
            _kill(service)
            return 1


def _prepare(parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [*PASSED_ON, signal.SIGCHLD])
    die_with(parent)


def _reap(pid: int) -> int | None:
    """Reap all ended processes; return the service's exit code, negative for a signal, once it has ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def _kill(service: subprocess.Popen[bytes]) -> None:
    os.kill(service.pid, STACKS)
    time.sleep(STACKS_S)
    service.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
