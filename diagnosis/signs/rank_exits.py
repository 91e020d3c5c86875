"""Read how every rank ended, as its node's launcher recorded it: exit code or signal, time and peak memory.

These files are in the job's own folder, so they affect no more than the verdict on this job. Node names come from the
caller.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from diagnosis.logs.prefixes import Prefix
from diagnosis.signs.sign import Sign
from vigil_core import untrusted

MAX_RANKS = 65_536  # ranks
MAX_SIGNS = 6  # earliest exits that become signs
CLOCK_SKEW_S = 2.0  # closer exits have no order: clocks differ, and ranks take time to exit
LAUNCHER = "launcher"
# Signals that end a process at once. Others unwind first, and may seem to end earlier.
_SUDDEN = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})


@dataclass(frozen=True, slots=True)
class RankExit:
    """The exit of a rank. `at` in Unix seconds; `by_launcher`: its launcher had sent the signal that ended it."""

    rank: int
    node: str
    exit_code: int | None = None
    signal: int | None = None
    at: float | None = None
    seconds: float | None = None
    peak_mib: int | None = None
    by_launcher: bool = False
    pid: int | None = None

    @property
    def is_failure(self) -> bool:
        """Return whether it ended by itself and not successfully."""
        return self.at is not None and not self.by_launcher and bool(self.signal or self.exit_code)

    @property
    def is_stuck(self) -> bool:
        """Return whether no signal could end it."""
        return self.at is None

    def __str__(self) -> str:
        how = f"by {_signal_name(self.signal)}" if self.signal else f"with exit code {self.exit_code}"
        after = f" after {self.seconds:,.1f} s" if self.seconds is not None else ""
        peak = f", with {self.peak_mib:,} MiB peak resident memory" if self.peak_mib else ""
        return f"rank {self.rank} ended {how}{after}{peak}"


def parse_exits(document: dict[str, Any], *, node: str) -> list[RankExit]:
    """Return the exits that one node's file lists; invalid ones are left out."""
    ranks = document.get("ranks")
    found = (
        [_parse_exit(item, node) for item in ranks[:MAX_RANKS] if isinstance(item, dict)]
        if isinstance(ranks, list)
        else []
    )
    return [end for end in found if end is not None]


def _parse_exit(record: dict[str, Any], node: str) -> RankExit | None:
    rank = untrusted.count(record.get("rank"), 1_000_000)
    if rank is None:
        return None
    return RankExit(
        rank,
        node,
        exit_code=untrusted.count(record.get("exit_code"), 256),
        signal=untrusted.count(record.get("signal"), 65) or None,
        at=untrusted.number(record.get("ended_at"), untrusted.MAX_UNIX_TIME),
        seconds=untrusted.duration(record.get("seconds")),
        peak_mib=untrusted.count(record.get("peak_mib"), 1 << 32),
        by_launcher=record.get("by_us") is True,
        pid=untrusted.count(record.get("pid"), 1 << 31),
    )


def failures(exits: Iterable[RankExit]) -> list[RankExit]:
    """Return the exits that are failures, earliest first."""
    return sorted((end for end in exits if end.is_failure), key=lambda end: (end.at or 0.0, end.rank))


def first_failed_rank(exits: Sequence[RankExit], named: int | None) -> int | None:
    """Return the rank that failed first by time; `named`, the launcher's own answer, where times are too close to tell.

    A rank that raised takes a moment to exit, in which its peers notice and may be gone before it.
    """
    failed = failures(exits)
    if not failed:
        return named
    first = failed[0]
    near = [end for end in failed if (end.at or 0.0) - (first.at or 0.0) <= CLOCK_SKEW_S]
    if first.signal in _SUDDEN and all(end.node == first.node or end.signal not in _SUDDEN for end in near):
        return first.rank
    if any(end.rank == named for end in near):
        return named
    return first.rank if len(near) == 1 else None


def signs_of_exits(exits: Sequence[RankExit], *, named: int | None = None) -> list[Sign]:
    """Return signs of the earliest failures, the first one marked, and of ranks that could not be ended."""
    first, failed = first_failed_rank(exits, named), failures(exits)
    reported = failed[:MAX_SIGNS] + [end for end in failed[MAX_SIGNS:] if end.rank == first]
    signs = []
    for end in reported:
        groups = {"signal": str(end.signal)} if end.signal else {"code": str(end.exit_code)}
        if end.rank == first:
            groups["first"] = "yes"
        prefix = Prefix(rank=end.rank, node=end.node, stamp=end.at, is_dated=True)
        signs.append(
            Sign(
                LAUNCHER, 0, str(end), cause="unknown", role="exit", prefix=prefix, groups=groups, source_kind="trainer"
            )
        )
    stuck = [end for end in exits if end.is_stuck]
    if stuck:
        text = f"rank {stuck[0].rank} could not be killed, not even by SIGKILL: it hangs in the kernel"
        prefix = Prefix(rank=stuck[0].rank, node=stuck[0].node)
        signs.append(
            Sign(
                LAUNCHER,
                0,
                text,
                cause="storage.io",
                role="context",
                prefix=prefix,
                count=len(stuck),
                source_kind="trainer",
            )
        )
    return signs


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"
