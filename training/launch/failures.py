"""Which rank failed first and why, among all that ended when one did (protocols.md §1)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, Signals
from typing import Any, Literal

from training.attempt.heartbeat import Beat

Kind = Literal["exception", "signal", "hang", "lost_peer", "address_in_use", "node", "gpu"]

_TAIL_BYTES = 64 * 1024
_LAST_LINES, _LAST_LINE_CHARS = 3, 200  # as context where no line names an error: what fits a phrase on a page
# The last line of a traceback, whatever libraries print after it while the process goes down. With a peer gone, NCCL's
# message goes on in lines of its own: the one that looks like an exception tells less than the first.
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
# What NCCL's own thread says before it ends the process, be it for a peer or for this rank's GPU.
_WATCHDOG = re.compile(r"Process group watchdog thread terminated with exception: (.+)$")
# Where a signal ends a process faulthandler's dump comes last; before it, perhaps, what C++ said of its exception.
_DIED = "Fatal Python error: "
_WHAT = re.compile(r"^\s*what\(\):\s+(.+)$")
# What CUDA says of a GPU that does not work any more. An illegal access or an assertion is mostly the program's own.
_GPU = re.compile(
    r"CUDA error: (?:uncorrectable ECC error|.*?(?:hardware|GPU is lost|fallen off the bus|NVLink)|"
    r"no CUDA-capable device|(?:all )?CUDA-capable device(?:s|\(s\)) (?:is/are|are) busy or unavailable|"
    r"unspecified launch failure|unknown error)|"
    r"GPU (?:is lost|has fallen off the bus)|uncorrectable NVLink error",
    re.IGNORECASE,
)
# What ends a process by its own fault or by the kernel's hand, as a shell passes it on in its exit code.
_FATAL = frozenset({SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGKILL, SIGSEGV})
_ADDRESS_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
# Output and errors share one log, so only its words tell that a last line is an error, as of a shell or a C program.
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
class Failure:
    """One rank's end that was not its own success. `order` tells who was first on one node."""

    rank: int
    kind: Kind
    exit_code: int | None = None
    signal: int | None = None
    error: str = ""
    order: float = 0.0
    last_lines: list[str] = field(default_factory=list)
    """The end of its log, as context for an exit code that no error explains."""

    @property
    def code(self) -> int:
        return 128 + self.signal if self.signal else self.exit_code or 1

    @property
    def summary(self) -> str:
        """Return the error, or without one how it ended."""
        return self.error or (f"killed by {_name_of(self.signal)}" if self.signal else f"exit code {self.code}")

    def in_place(self, *, spares: bool) -> bool:
        """Whether starting the ranks again may help. With a node less it may: if enough are left; with a broken GPU
        only where another node stands by to take its node's place."""
        return self.kind != "exception" and (spares or self.kind != "gpu")

    def told(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "order"}


def failure_of(rank: int, exit_code: int | None, signal: int | None, log: Path, *, order: float) -> Failure:
    """Return what an exit means. A shell whose child died of a signal exits with 128 plus its number."""
    if signal is None and (exit_code or 0) - 128 in _FATAL:
        exit_code, signal = None, (exit_code or 0) - 128
    lines = _lines_of(log)
    error = _error_of_signal(signal, lines) if signal else last_error(lines)
    kind: Kind = "exception"
    if signal is not None and not (signal == SIGABRT and _LOST_PEER.search(error)):
        kind = "signal"
    elif _GPU.search(error):
        kind = "gpu"
    elif _ADDRESS_IN_USE.search(error):
        kind = "address_in_use"
    elif _LOST_PEER.search(error):
        kind = "lost_peer"
    context = [] if error else [line[:_LAST_LINE_CHARS] for line in lines[-_LAST_LINES:]]
    return Failure(rank, kind, exit_code, signal, error, order, context)


def _error_of_signal(signal: int, lines: list[str]) -> str:
    """Return why a signal ended a rank: an error that the log tells of a crash, else the signal's name.

    A signal from outside, such as SIGKILL, cannot be announced by the program: whatever it printed last says nothing.
    """
    crashed = signal in _FATAL and signal != SIGKILL
    return (crashed and _raised(lines)) or f"killed by {_name_of(signal)}"


def _name_of(signal: int) -> str:
    try:
        return Signals(signal).name
    except ValueError:
        return f"signal {signal}"


def left_early(rank: int, beat: Beat | None, *, order: float) -> Iterator[Failure]:
    """What exit code 0 means of a rank of Vigil's own that was not at its end: code that it runs has ended the process.

    `beat`: its last word; None: it left none, as on a disk that has been full from the first, and is believed.
    """
    if beat is not None and beat.phase != "end":
        said = f"It left with exit code 0 before its run had ended ({beat.phase}): does its code call os._exit()?"
        yield Failure(rank, "exception", 0, None, said, order)


def first_failure(failures: Iterable[Failure]) -> Failure:
    """The one that the others followed from: a peer that was lost is an echo of whatever took it away."""
    return min(failures, key=lambda failure: (failure.kind == "lost_peer", failure.order))


def last_error(lines: list[str]) -> str:
    """Return the last error that a log names, or "" where its end is ordinary output; at most 500 characters.

    That is the last line of the last traceback, what NCCL's thread, C++ or a dying Python said, else the log's last
    line if it reads like an error.
    """
    last = lines[-1][:500] if lines else ""
    return _raised(lines) or (last if _is_error(last) else "")


def _is_error(line: str) -> bool:
    return bool(_GPU.search(line) or _ADDRESS_IN_USE.search(line) or _ERROR.search(_QUANTITY.sub("", line)))


def _lines_of(log: Path) -> list[str]:
    """Return the lines at the end of a log that are not blank."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = [
                _ANSI.sub("", line).rstrip() for line in file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
            ]
    except OSError:
        return []
    return [line for line in lines if line]


def _raised(lines: list[str]) -> str:
    """Return the last error that some line names, or "" where none does."""
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
