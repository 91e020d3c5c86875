"""Start and end the ranks of one node: torchrun's environment, and nothing left running afterwards."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from training.attempt.hang import DUMP
from training.launch.stop import STOP_SIGNALS

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Variables that a job may inherit; everything else (the portal's settings, a person's secrets) is dropped.
_PLAIN = {
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "HOSTNAME",
    "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH",
    "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "VIRTUAL_ENV", "MODULEPATH",
    "LOADEDMODULES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
}  # fmt: skip
_PREFIXES = (
    "LC_", "SLURM_", "SLURMD_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "FI_", "IBV_", "TORCH_", "TORCHINDUCTOR_",
    "TRITON_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "HF_", "PYTORCH_",
)  # fmt: skip
UNKILLABLE_SECONDS = 1.0  # wait for other processes in uninterruptible sleep
_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "JWT", "CREDENTIAL", "_KEY")


def inherited(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that ranks inherit. VIGIL_PASS_ON names those that the job's modules and conda have set."""
    allowed = _PLAIN | set(environment.get("VIGIL_PASS_ON", "").split())
    return {
        name: value
        for name, value in environment.items()
        if (name in allowed or name.startswith(_PREFIXES)) and not any(word in name for word in _SECRETS)
    }


@dataclass(frozen=True)
class RankExit:
    """How a rank ended. `at` is this node's monotonic clock: it orders exits on one node only.

    `peak_mib`: the largest resident memory of the rank or any one of its children (at least the launcher's own when it
    started the rank). `by_us`: ended by a signal that this launcher sent.
    """

    rank: int
    exit_code: int | None
    signal: int | None
    at: float
    ended_at: float = 0.0  # Unix time
    peak_mib: int | None = None
    by_us: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass
class Rank:
    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int  # readable once the process has ended
    control: int  # our end of the pipe to its helper thread (training.attempt.hang)
    log: Path
    exit: RankExit | None = None
    began_at: float = field(default_factory=time.monotonic)
    sent: set[int] = field(default_factory=set)  # signals that this launcher sent

    def poll(self) -> RankExit | None:
        """Return the exit once the process has ended, else None."""
        if self.exit is None and (ended := self._collect()) is not None:
            code, peak_mib = ended
            number = -code if code is not None and code < 0 else None
            self.exit = RankExit(
                self.rank,
                code if number is None else None,
                number,
                time.monotonic(),
                ended_at=time.time(),
                peak_mib=peak_mib,
                by_us=number in self.sent,
            )
            os.close(self.pidfd)
            os.close(self.control)
        return self.exit

    def _collect(self) -> tuple[int | None, int | None] | None:
        """Return exit code (negative: the signal) and peak memory in MiB once it has ended.

        Popen's wait drops the second.
        """
        try:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        except ChildProcessError:  # reaped elsewhere: how it ended is unknown
            return None, None
        if not pid:
            return None
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.process.returncode, usage.ru_maxrss // 1024

    def dump(self) -> None:
        """Request stacks and the flight recorder, if the process is prepared for that."""
        if self.exit is None:
            with suppress(OSError):
                os.write(self.control, DUMP)
            if self.has_handler(signal.SIGUSR2):
                self.signal(signal.SIGUSR2)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.exit is None:
                self.sent.add(number)
                os.kill(self.process.pid, number)

    def has_handler(self, number: int) -> bool:
        """Return whether the process catches this signal; without a handler it would be killed."""
        return bool(self._mask("SigCgt") >> (number - 1) & 1)

    def ignores(self, number: int) -> bool:
        return bool(self._mask("SigIgn") >> (number - 1) & 1)

    def _mask(self, name: str) -> int:
        with suppress(OSError, ValueError):
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
                if line.startswith(f"{name}:"):
                    return int(line.split()[1], 16)
        return 0


class CannotStart(Exception):
    """The command of a rank could not be started."""


def start(
    rank: int,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    directory: Path,
    log: Path,
    ignored: Sequence[signal.Signals],
) -> Rank:
    """Start one process in its own group, which dies with the launcher and writes to its log.

    `ignored` signals stay ignored through exec. Raises CannotStart.
    """
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise CannotStart(f"its log cannot be opened: {error}") from None
    child_end, launcher_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(launcher_end, False)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**environment, "VIGIL_CONTROL": str(child_end)},
            cwd=directory,
            pass_fds=(child_end,),
            process_group=0,
            preexec_fn=child_setup(ignored),
        )
    except OSError as error:
        os.close(launcher_end)
        raise CannotStart(f"{command[0]} cannot be started: {error}") from None
    finally:
        os.close(file)
        os.close(child_end)
    return Rank(rank, process, os.pidfd_open(process.pid), launcher_end, log)


def child_setup(ignored: Sequence[signal.Signals]) -> Callable[[], None]:
    """Return the function that runs between fork and exec: die with the launcher, set which signals are ignored."""
    launcher = os.getpid()

    def setup() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # the launcher died before prctl
            os._exit(1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    return setup


def become_subreaper() -> None:
    """Adopt processes that ranks leave behind, instead of init, so that they can be found and ended."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_all(ranks: Sequence[Rank], *, spare: Collection[int] = (), patience: float = 10.0) -> None:
    """Kill every rank, its group and every other descendant (except `spare`) until nothing is left.

    Gives up after `patience` seconds: a process in uninterruptible sleep cannot be killed from here. For processes
    other than ranks, such as a reader of GPUs that is blocked in the driver, the wait is shorter.
    """
    began = time.monotonic()
    deadline = began + patience
    for rank in ranks:
        if rank.poll() is None:  # a reaped pid may be reused by now; its children are among the descendants
            rank.sent.add(signal.SIGKILL)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)
    while True:
        for rank in ranks:
            rank.poll()
        left = descendants(spare=spare)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        reap(spare=spare, but={rank.process.pid for rank in ranks})
        if time.monotonic() > began + UNKILLABLE_SECONDS:
            left = [process for process in left if not _is_unkillable(process)]
        if (not left and all(rank.exit for rank in ranks)) or time.monotonic() > deadline:
            return
        time.sleep(0.005)


def _is_unkillable(process: psutil.Process) -> bool:
    """Return whether the process is in uninterruptible sleep."""
    with suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_DISK_SLEEP)
    return False


def descendants(*, spare: Collection[int] = ()) -> list[psutil.Process]:
    """Return every live descendant of this process, except `spare` and their descendants."""
    found: list[psutil.Process] = []
    with suppress(psutil.Error):
        for child in psutil.Process().children():
            if child.pid not in spare and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
                with suppress(psutil.Error):
                    found += child.children(recursive=True)
    return found


def reap(*, spare: Collection[int], but: set[int]) -> None:
    """Reap adopted children that have ended, except those that Popen will collect."""
    with suppress(psutil.Error):
        for child in psutil.Process().children():
            if child.pid in spare or child.pid in but:
                continue
            with suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
