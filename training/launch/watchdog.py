"""Tell a stuck rank from a slow one, by the heartbeats of all ranks (protocols.md §6).

A rank that waits in a collective looks stuck too; the one to blame is *behind*: at the lowest step. No verdict is made
while any rank at that step is within the time limit of its phase, so a long validation, compilation or write on one
rank never counts against the ranks that wait for it. Time in which this process did not poll does not count: whatever
suspended it (a suspended job, a hung file system) suspended the ranks or their heartbeats too.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from training.attempt.heartbeat import Beat, heartbeat_path, read_beat

# Seconds without a change of the heartbeat. `start`: until the first heartbeat. `init`: once all ranks are in it.
LIMITS: Mapping[str, float] = {
    "start": 600,
    "init": 20,
    "restore": 1800,
    "compile": 3600,
    "step": 60,
    "exchange": 1800,
    "data": 600,
    "validate": 3600,
    "save": 3600,
    "profile": 1200,
    "end": 600,
}
STEPS_TO_ARM = 5
MEDIAN_FACTOR = 10
STALL_SECONDS = 2.0  # a longer gap between two polls means that this process itself was suspended
NEVER = float("inf")
FLIGHT_BYTES = 64 * 1024 * 1024


@dataclass
class _WatchedRank:
    """One rank's last heartbeat, and when *we* noticed it change (clocks of other nodes do not count)."""

    rank: int
    path: Path
    changed_at: float
    beat: Beat | None = None
    stepped_at: float | None = None  # when its step last increased
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=50))

    def read(self, now: float) -> None:
        beat = read_beat(self.path)
        if beat is None or beat == self.beat:
            return
        if self.beat is not None and beat.step > self.beat.step:
            if self.stepped_at is not None:
                self.durations.append((now - self.stepped_at) / (beat.step - self.beat.step))
            self.stepped_at = now
        self.beat, self.changed_at = beat, now

    @property
    def is_armed(self) -> bool:
        """Whether it is past its first steps, which may compile. By the rank's own count: polls may miss steps."""
        return self.beat is not None and self.beat.begun > STEPS_TO_ARM

    @property
    def phase(self) -> str:
        return self.beat.phase if self.beat else "start"

    @property
    def step(self) -> int:
        """How far the rank is: below step 0 while it has yet to start or to join the others, whom it holds up."""
        if self.beat is None or self.phase == "start":
            return -2
        return -1 if self.phase == "init" else self.beat.step


@dataclass(frozen=True)
class Hang:
    """The ranks that are stuck, out of how many, in which phase and for how long."""

    ranks: list[int]
    rank_count: int
    phase: str
    step: int
    seconds: float
    unit: str = "step"

    def as_payload(self) -> dict[str, Any]:
        """Return it as `broken-<i>.json` has it, which launchers of other versions read and write, too."""
        return {
            "ranks": self.ranks, "of": self.rank_count, "phase": self.phase, "step": self.step,
            "seconds": self.seconds, "counts": self.unit,
        }  # fmt: skip

    def __str__(self) -> str:
        where = f"{self.phase} at {self.unit} {self.step}, nothing for {self.seconds:.0f} s"
        if len(self.ranks) == self.rank_count > 1:
            return f"all {self.rank_count} ranks are stuck: {where}"
        who = f"rank {self.ranks[0]} is" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))} are"
        return f"{who} {'behind' if self.rank_count > 1 else 'stuck'}: {where}"


class Watchdog:
    """Polls the heartbeats of one incarnation of our trainer (scripts have none)."""

    def __init__(
        self,
        attempt_dir: Path,
        *,
        incarnation: int,
        ranks: Iterable[int],
        limits: Mapping[str, float] | None = None,
        unit: str = "step",
    ) -> None:
        """`limits`: seconds by phase, over the defaults.

        `unit`: the run's unit of progress (step or round), for messages.
        """
        self._limits, self._unit = {**LIMITS, **(limits or {})}, unit
        now = time.monotonic()
        self._watched = [
            _WatchedRank(rank, heartbeat_path(attempt_dir, rank=rank, incarnation=incarnation), now) for rank in ranks
        ]
        self._all_in_init_at: float | None = None
        self._polled_at = now

    def poll(self, now: float | None = None) -> Hang | None:
        """Read every heartbeat; return the hang that they show, or None."""
        now = time.monotonic() if now is None else now
        self._discount(now - self._polled_at - STALL_SECONDS)
        self._polled_at = now
        for watched in self._watched:
            watched.read(now)
        if self._all_in_init_at is None and all(watched.phase != "start" for watched in self._watched):
            self._all_in_init_at = now
        behind = self._slowest()
        if not behind or not all(self._overdue(watched, now) for watched in behind):
            return None
        longest = max(behind, key=lambda watched: now - watched.changed_at)
        ranks = sorted(watched.rank for watched in behind)
        silent = now - longest.changed_at
        return Hang(ranks, len(self._watched), longest.phase, max(longest.step, 0), silent, self._unit)

    def _discount(self, seconds: float) -> None:
        """Shift all deadlines by seconds in which nobody polled."""
        if seconds > 0:
            for watched in self._watched:
                watched.changed_at += seconds
            if self._all_in_init_at is not None:
                self._all_in_init_at += seconds

    @property
    def has_stepped(self) -> bool:
        """Whether every rank has begun its second step, so that the start is over."""
        return all(watched.beat is not None and watched.beat.begun > 1 for watched in self._watched)

    def _slowest(self) -> list[_WatchedRank]:
        """Return the ranks at the lowest step. A rank that has finished its work holds nobody up."""
        running = [watched for watched in self._watched if watched.phase != "end"]
        if not running:
            return list(self._watched)
        lowest = min(watched.step for watched in running)
        return [watched for watched in running if watched.step == lowest]

    def _overdue(self, watched: _WatchedRank, now: float) -> bool:
        since = watched.changed_at
        if watched.phase == "init":
            if self._all_in_init_at is None:
                return False  # a rank is still importing; its own limit applies
            since = max(since, self._all_in_init_at)
        return now - since > self._limit(watched)

    def _limit(self, watched: _WatchedRank) -> float:
        if watched.phase != "step":
            return self._limits.get(watched.phase, NEVER)
        if not watched.is_armed:
            return self._limits["compile"]
        return max(self._limits["step"], MEDIAN_FACTOR * median(watched.durations or [0.0]))


def behind_in_collectives(flight: Path, *, incarnation: int, ranks: list[int]) -> list[int]:
    """Return those of `ranks`, stuck at one step, that are most collectives behind in their groups (flight recorder).

    If only some ranks left a record, return the others: a process that still responds is merely waiting.
    """
    begun = {
        rank: counts for rank in ranks if (counts := _collectives(flight / f"{incarnation}.{rank}.json")) is not None
    }
    if not begun:
        return ranks
    most: dict[str, int] = {}
    for counts in begun.values():
        most.update({group: count for group, count in counts.items() if count > most.get(group, 0)})
    # Compared within each group: a pipeline's stages, for example, have their own, with more or fewer collectives.
    lag = {rank: sum(most[group] - count for group, count in counts.items()) for rank, counts in begun.items()}
    return [rank for rank in ranks if rank not in begun] or [rank for rank in lag if lag[rank] == max(lag.values())]


def _collectives(path: Path) -> dict[str, int] | None:
    """Return how many collectives a rank has begun in each of its groups, from torch's flight recorder.

    None if unreadable.

    NCCL and gloo count the same group separately.
    """
    last: dict[str, int] = {}
    try:
        with open(path, "rb") as file:
            for entry in json.loads(file.read(FLIGHT_BYTES))["entries"]:
                library = str(entry.get("profiling_name", "")).partition(":")[0]
                group = f"{library} {entry['process_group']}"
                last[group] = max(last.get(group, 0), int(entry["collective_seq_id"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return last
