"""The ranks of one node: started with torchrun's environment, killed without remainder."""

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
# What a job may inherit; everything else (the portal's settings, a person's secrets) stays outside.
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
HELD_SECONDS = 1.0
_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "JWT", "CREDENTIAL", "_KEY")


def inherited(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The part of our environment that ranks get; VIGIL_PASS_ON names what the job's modules and conda have set."""
    known = _PLAIN | set(environment.get("VIGIL_PASS_ON", "").split())
    return {
        name: value
        for name, value in environment.items()
        if (name in known or name.startswith(_PREFIXES)) and not any(word in name for word in _SECRETS)
    }


@dataclass(frozen=True)
class Exit:
    """How a rank ended. `at` is this node's monotonic clock: good for the order on one node only.

    `peak_mib`: the most memory that it, or any one process of its own, had resident (never less than the launcher had
    when it started the rank). `by_us`: of a signal that this launcher had sent.
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

    @property
    def code(self) -> int:
        """The exit code as a shell tells it."""
        return 128 + self.signal if self.signal else (self.exit_code if self.exit_code is not None else 1)


@dataclass
class Rank:
    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int  # readable once the process has ended
    control: int  # our end of the pipe to its helper thread (training.attempt.hang)
    log: Path
    exit: Exit | None = None
    began: float = field(default_factory=time.monotonic)
    sent: set[int] = field(default_factory=set)  # signals of ours

    def poll(self) -> Exit | None:
        """The exit once it has ended."""
        if self.exit is None and (ended := self._collect()) is not None:
            code, peak_mib = ended
            number = -code if code is not None and code < 0 else None
            self.exit = Exit(
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
        """Exit code (negative: the signal) and peak memory, once it has ended: Popen's own wait drops the second."""
        try:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        except ChildProcessError:  # collected by somebody else: nobody knows how it ended
            return None, None
        if not pid:
            return None
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.process.returncode, usage.ru_maxrss // 1024

    def dump(self) -> None:
        """Ask for stacks and the flight recorder, where the process has prepared for that."""
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
        """Whether the process catches this signal; sending it otherwise would kill it."""
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
    """No process could be made of the command."""


def start(
    rank: int,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    directory: Path,
    log: Path,
    ignored: Sequence[signal.Signals],
) -> Rank:
    """One process in its own group, dying with us, its output in its log. `ignored` signals stay so through exec."""
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise CannotStart(f"its log cannot be opened: {error}") from None
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(ours, False)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**environment, "VIGIL_CONTROL": str(theirs)},
            cwd=directory,
            pass_fds=(theirs,),
            process_group=0,
            preexec_fn=child_setup(ignored),
        )
    except OSError as error:
        os.close(ours)
        raise CannotStart(f"{command[0]} cannot be started: {error}") from None
    finally:
        os.close(file)
        os.close(theirs)
    return Rank(rank, process, os.pidfd_open(process.pid), ours, log)


def child_setup(ignored: Sequence[signal.Signals]) -> Callable[[], None]:
    """What runs between fork and exec: die with the launcher, leave some signals to it."""
    launcher = os.getpid()

    def setup() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    return setup


def become_subreaper() -> None:
    """What ranks leave behind becomes our child instead of init's, so that it can be found and ended."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_all(ranks: Sequence[Rank], *, spare: Collection[int] = (), patience: float = 10.0) -> None:
    """SIGKILL to every rank, its group and whatever else descends from us (but `spare`), until nothing is left.

    Gives up after `patience`: a process in uninterruptible sleep cannot be helped from here. One that is no rank,
    as a reader of GPUs that a driver holds, is waited for less long.
    """
    began = time.monotonic()
    deadline = began + patience
    for rank in ranks:
        if rank.poll() is None:  # a reaped pid may be somebody else's by now; what it left is among the descendants
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
        if time.monotonic() > began + HELD_SECONDS:
            left = [process for process in left if not _is_held(process)]
        if (not left and all(rank.exit for rank in ranks)) or time.monotonic() > deadline:
            return
        time.sleep(0.005)


def _is_held(process: psutil.Process) -> bool:
    """Whether it sleeps where no signal reaches it."""
    with suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_DISK_SLEEP)
    return False


def descendants(*, spare: Collection[int] = ()) -> list[psutil.Process]:
    """Every live process below us, except `spare` and what is below it."""
    found: list[psutil.Process] = []
    with suppress(psutil.Error):
        for child in psutil.Process().children():
            if child.pid not in spare and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
                with suppress(psutil.Error):
                    found += child.children(recursive=True)
    return found


def reap(*, spare: Collection[int], but: set[int]) -> None:
    """Collect adopted children that have ended; our own are Popen's to collect."""
    with suppress(psutil.Error):
        for child in psutil.Process().children():
            if child.pid in spare or child.pid in but:
                continue
            with suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
