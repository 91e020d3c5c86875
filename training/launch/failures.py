"""Determine which rank failed first and why, among all that ended when one did (protocols.md §1)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, Signals
from typing import Any, Literal

from training.attempt.heartbeat import Beat

FailureKind = Literal["exception", "signal", "hang", "lost_peer", "address_in_use", "node", "gpu"]

_TAIL_BYTES = 64 * 1024
_LAST_LINES, _LAST_LINE_CHARS = 3, 200  # shown as context where no line names an error
# The last line of a traceback, whatever libraries print after it while the process exits. When a peer is gone, NCCL's
# message spans several lines, and the one that looks like an exception says less than the first.
_RAISED = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?!nccl(?:Remote|System|Internal)Error)"
    r"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failed|Warning))\b(?::.*)?$"
)
_LOST_PEER = re.compile(
    r"connection (?:closed|reset|refused)|broken pipe|\bgloo\b|\bNCCL\b|DistBackendError|DistNetworkError|"
    r"DistStoreError|failed to recv|recvValue|sendBytes|connectFullMesh|monitoredBarrier|RendezvousFailed|"
    r"timed out after \d+ms|wait timeout|socket timeout|process group .* (?:abort|watchdog)",
    re.IGNORECASE,
)
# NCCL's watchdog thread prints this before it ends the process, because of a peer or of this rank's GPU.
_WATCHDOG = re.compile(r"Process group watchdog thread terminated with exception: (.+)$")
# When a signal ends a process, faulthandler's dump comes last, sometimes preceded by the message of a C++ exception.
_DIED = "Fatal Python error: "
_WHAT = re.compile(r"^\s*what\(\):\s+(.+)$")
# CUDA's errors for a broken GPU. An illegal access or an assertion is mostly a bug of the program.
_GPU = re.compile(
    r"CUDA error: (?:uncorrectable ECC error|.*?(?:hardware|GPU is lost|fallen off the bus|NVLink)|"
    r"no CUDA-capable device|(?:all )?CUDA-capable device(?:s|\(s\)) (?:is/are|are) busy or unavailable|"
    r"unspecified launch failure|unknown error)|"
    r"GPU (?:is lost|has fallen off the bus)|uncorrectable NVLink error",
    re.IGNORECASE,
)
# Signals from a crash or from the kernel, which a shell passes on as 128 plus the number.
_FATAL = frozenset({SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGKILL, SIGSEGV})
_ADDRESS_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
# Output and errors share one log: only its wording shows that a shell's or C program's last line is an error.
_ERROR = re.compile(
    r"errors?\b|\b(?:exception|fatal|failed|failures?|failing|panic\w*|abort(?:ed|ing)?|killed|core dumped|"
    r"segmentation fault|bus error|broken pipe|can ?not|can't|could ?n[o']t|could not|unable to|not found|no such|"
    r"not permitted|not allowed|not enough|no space|denied|refused|rejected|forbidden|unauthorized|invalid|illegal|"
    r"unrecognized|unexpected|unbound variable|timed out|out of memory|(?:closed|reset) by (?:remote )?peer|"
    r"ENOENT|ENOSPC|EDQUOT|EACCES|ENOMEM)\b|^(?-i:E\d{4} |\[E\d)",
    re.IGNORECASE,
)
# "val_error=0.12", "errors: 0", '"error": null' and "0 failed" report a quantity.
_QUANTITY = re.compile(
    r"(?:error|exception|failed|failure|rejected|aborted|killed|invalid)s?(?:[ _]?(?:rate|count))?[\"']?\s*"
    r"(?:[=:]\s*|\s)[\"']?(?:[-+]?[\d.]|null|none|nan|false)|"
    r"\b(?:no|0|zero|without) (?:\w+ )?(?:errors?|exceptions?|failed|failures?|aborted|killed|invalid|rejected)\b",
    re.IGNORECASE,
)
_ANSI = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


@dataclass(frozen=True)
class RankFailure:
    """A rank's unsuccessful end. `order` is the time of the end, comparable within one node only."""

    rank: int
    kind: FailureKind
    exit_code: int | None = None
    signal: int | None = None
    error: str = ""
    order: float = 0.0
    last_lines: list[str] = field(default_factory=list)
    """The end of the rank's log, as context for an exit code that no error explains."""

    @property
    def code(self) -> int:
        return 128 + self.signal if self.signal else self.exit_code or 1

    @property
    def summary(self) -> str:
        """Return the error, or without one how it ended."""
        return self.error or (f"killed by {_signal_name(self.signal)}" if self.signal else f"exit code {self.code}")

    def may_restart(self, *, spares: bool) -> bool:
        """Return whether restarting the ranks may help.

        A lost node: yes, if enough nodes are left. A broken GPU: only where a spare node can replace its node.
        """
        return self.kind != "exception" and (spares or self.kind != "gpu")

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "order"}


def classify_exit(rank: int, exit_code: int | None, signal: int | None, log: Path, *, order: float) -> RankFailure:
    """Classify an unsuccessful exit by its code, signal and log.

    A shell whose child was killed by a signal exits with 128 plus the signal's number.
    """
    if signal is None and (exit_code or 0) - 128 in _FATAL:
        exit_code, signal = None, (exit_code or 0) - 128
    lines = _tail_lines(log)
    error = _signal_error(signal, lines) if signal else last_error(lines)
    kind: FailureKind = "exception"
    if signal is not None and not (signal == SIGABRT and _LOST_PEER.search(error)):
        kind = "signal"
    elif _GPU.search(error):
        kind = "gpu"
    elif _ADDRESS_IN_USE.search(error):
        kind = "address_in_use"
    elif _LOST_PEER.search(error):
        kind = "lost_peer"
    context = [] if error else [line[:_LAST_LINE_CHARS] for line in lines[-_LAST_LINES:]]
    return RankFailure(rank, kind, exit_code, signal, error, order, context)


def _signal_error(signal: int, lines: list[str]) -> str:
    """Return why a signal ended a rank: the error of a crash in the log, else the signal's name.

    A program cannot announce a signal from outside, such as SIGKILL: whatever it printed last explains nothing.
    """
    crashed = signal in _FATAL and signal != SIGKILL
    return (crashed and _last_raised(lines)) or f"killed by {_signal_name(signal)}"


def _signal_name(signal: int) -> str:
    try:
        return Signals(signal).name
    except ValueError:
        return f"signal {signal}"


def premature_exit(rank: int, beat: Beat | None, *, order: float) -> Iterator[RankFailure]:
    """Yield a failure if one of our ranks left with exit code 0 before its end: some code has ended the process.

    `beat`: its last heartbeat; None (none could be written, as on a full disk) is trusted.
    """
    if beat is not None and beat.phase != "end":
        message = f"It left with exit code 0 before its run had ended ({beat.phase}): does its code call os._exit()?"
        yield RankFailure(rank, "exception", 0, None, message, order)


def first_failure(failures: Iterable[RankFailure]) -> RankFailure:
    """Return the failure that caused the others: losing a peer is a consequence of whatever ended that peer."""
    return min(failures, key=lambda failure: (failure.kind == "lost_peer", failure.order))


def last_error(lines: list[str]) -> str:
    """Return the last error that a log names, or "" where it ends with ordinary output; at most 500 characters.

    That is the last line of the last traceback, a message of NCCL's thread, C++ or a crashing Python; else the log's
    last line if it reads like an error.
    """
    last = lines[-1][:500] if lines else ""
    return _last_raised(lines) or (last if _is_error(last) else "")


def _is_error(line: str) -> bool:
    return bool(_GPU.search(line) or _ADDRESS_IN_USE.search(line) or _ERROR.search(_QUANTITY.sub("", line)))


def _tail_lines(log: Path) -> list[str]:
    """Return the non-blank lines at the end of a log."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = [
                _ANSI.sub("", line).rstrip() for line in file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
            ]
    except OSError:
        return []
    return [line for line in lines if line]


def _last_raised(lines: list[str]) -> str:
    """Return the last error that a line names, or ""."""
    died = ""
    for line in reversed(lines):
        if watchdog := _WATCHDOG.search(line):
            return watchdog[1][:500]
        if died and (what := _WHAT.match(line)):
            return what[1][:500]
        if _RAISED.match(line):
            return line[:500]
        if line.startswith(_DIED):
            died = line
    return died[:500]
