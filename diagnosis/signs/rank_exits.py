"""How every rank ended, as the launcher of its node wrote it down: exit code or signal, when, with how much memory.

Files of the job's own folder, so not believed beyond the verdict on this job; a node is named by whoever reads them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from diagnosis.logs.prefixes import Prefix
from diagnosis.signs.sign import Sign
from vigil_core import untrusted

MOST = 65_536  # ranks
TOLD = 6  # ends that become signs, the earliest
CLOCKS_S = 2.0  # ends of two nodes closer than this order nothing, nor do those of two ranks that take time to leave
LAUNCHER = "launcher"
# What ends a process where it stands. Others have to unwind first, and may be seen to end before.
_SUDDEN = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})


@dataclass(frozen=True, slots=True)
class End:
    """One rank's end. `by_us`: its launcher had sent the signal that ended it."""

    rank: int
    node: str
    exit_code: int | None = None
    signal: int | None = None
    at: float | None = None
    seconds: float | None = None
    peak_mib: int | None = None
    by_us: bool = False
    pid: int | None = None

    @property
    def is_failure(self) -> bool:
        """Whether it ended by itself, and not well."""
        return self.at is not None and not self.by_us and bool(self.signal or self.exit_code)

    @property
    def is_stuck(self) -> bool:
        """Whether nothing could end it."""
        return self.at is None

    def __str__(self) -> str:
        how = f"by {_name_of(self.signal)}" if self.signal else f"with exit code {self.exit_code}"
        after = f" after {self.seconds:,.1f} s" if self.seconds is not None else ""
        peak = f", with {self.peak_mib:,} MiB resident at the most" if self.peak_mib else ""
        return f"rank {self.rank} ended {how}{after}{peak}"


def parse(told: dict[str, Any], *, node: str) -> list[End]:
    """The ends that one node's file tells of; what is not what it should be is left out."""
    ranks = told.get("ranks")
    found = [_end_of(one, node) for one in ranks[:MOST] if isinstance(one, dict)] if isinstance(ranks, list) else []
    return [end for end in found if end is not None]


def _end_of(told: dict[str, Any], node: str) -> End | None:
    rank = untrusted.count(told.get("rank"), 1_000_000)
    if rank is None:
        return None
    return End(
        rank,
        node,
        exit_code=untrusted.count(told.get("exit_code"), 256),
        signal=untrusted.count(told.get("signal"), 65) or None,
        at=untrusted.number(told.get("ended_at"), untrusted.END_OF_TIME),
        seconds=untrusted.duration(told.get("seconds")),
        peak_mib=untrusted.count(told.get("peak_mib"), 1 << 32),
        by_us=told.get("by_us") is True,
        pid=untrusted.count(told.get("pid"), 1 << 31),
    )


def failures(ends: Iterable[End]) -> list[End]:
    """Those that ended by themselves and not well, the earliest first."""
    return sorted((end for end in ends if end.is_failure), key=lambda end: (end.at or 0.0, end.rank))


def first_of(ends: Sequence[End], named: int | None) -> int | None:
    """The rank that began it, as far as times tell; where they are too close the launcher's own word, `named`.

    A rank that raised takes a moment to leave, in which its peers notice and may be gone before it.
    """
    failed = failures(ends)
    if not failed:
        return named
    first = failed[0]
    near = [end for end in failed if (end.at or 0.0) - (first.at or 0.0) <= CLOCKS_S]
    if first.signal in _SUDDEN and all(end.node == first.node or end.signal not in _SUDDEN for end in near):
        return first.rank
    if any(end.rank == named for end in near):
        return named
    return first.rank if len(near) == 1 else None


def signs_of(ends: Sequence[End], *, named: int | None = None) -> list[Sign]:
    """The earliest failures as ends of processes, the one that began it marked; and who could not be ended."""
    first, failed = first_of(ends, named), failures(ends)
    told = failed[:TOLD] + [end for end in failed[TOLD:] if end.rank == first]
    found = []
    for end in told:
        groups = {"signal": str(end.signal)} if end.signal else {"code": str(end.exit_code)}
        if end.rank == first:
            groups["first"] = "yes"
        prefix = Prefix(rank=end.rank, node=end.node, stamp=end.at, is_dated=True)
        found.append(Sign(LAUNCHER, 0, str(end), "unknown", "exit", prefix, groups=groups, of="trainer"))
    stuck = [end for end in ends if end.is_stuck]
    if stuck:
        text = f"rank {stuck[0].rank} could not be ended, not by SIGKILL either: something in the kernel holds it"
        prefix = Prefix(rank=stuck[0].rank, node=stuck[0].node)
        found.append(Sign(LAUNCHER, 0, text, "storage.io", "context", prefix, count=len(stuck), of="trainer"))
    return found


def _name_of(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"
