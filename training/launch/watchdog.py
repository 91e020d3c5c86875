"""Telling a stuck rank from a slow one, by the heartbeats of all (protocols.md §6).

A rank that waits in a collective looks stuck too; the one to blame is *behind*: at the lowest step. Nobody is judged
while any rank at that step is within the limit of the phase it is in, so a long validation, compile or write by one
rank never costs the others that wait for it. Time in which nobody looked does not count: whatever held this process,
as a job that is suspended or a file system that hangs, held the ranks or their word, too.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from training.attempt.heartbeat import Beat, heartbeat_path, read_beat

# Seconds without a change of the heartbeat. `start`: from the process to its first one. `init`: once all are there.
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
HELD_SECONDS = 2.0  # between two looks: longer, and this process was held
NEVER = float("inf")
FLIGHT_BYTES = 64 * 1024 * 1024


@dataclass
class _Watched:
    """What is known of one rank: its last heartbeat, and when *we* saw it change (no clock of another node counts)."""

    rank: int
    path: Path
    changed: float
    beat: Beat | None = None
    stepped: float | None = None  # when its step last rose
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=50))

    def look(self, now: float) -> None:
        beat = read_beat(self.path)
        if beat is None or beat == self.beat:
            return
        if self.beat is not None and beat.step > self.beat.step:
            if self.stepped is not None:
                self.durations.append((now - self.stepped) / (beat.step - self.beat.step))
            self.stepped = now
        self.beat, self.changed = beat, now

    @property
    def is_armed(self) -> bool:
        """Whether it has made its first steps, in which it may well compile. The rank counts: looks may miss them."""
        return self.beat is not None and self.beat.begun > STEPS_TO_ARM

    @property
    def phase(self) -> str:
        return self.beat.phase if self.beat else "start"

    @property
    def step(self) -> int:
        """How far it is: nobody is further than a rank that has yet to begin, or to meet the others, lets them be."""
        if self.beat is None or self.phase == "start":
            return -2
        return -1 if self.phase == "init" else self.beat.step


@dataclass(frozen=True)
class Hang:
    """Which ranks are stuck, of how many, in what, since when."""

    ranks: list[int]
    of: int
    phase: str
    step: int
    seconds: float
    counts: str = "step"

    def __str__(self) -> str:
        where = f"{self.phase} at {self.counts} {self.step}, nothing for {self.seconds:.0f} s"
        if len(self.ranks) == self.of > 1:
            return f"all {self.of} ranks are stuck: {where}"
        who = f"rank {self.ranks[0]} is" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))} are"
        return f"{who} {'behind' if self.of > 1 else 'stuck'}: {where}"


class Watchdog:
    """Looks at the heartbeats of one incarnation of our trainer (other people's scripts have none)."""

    def __init__(
        self,
        attempt_dir: Path,
        *,
        incarnation: int,
        ranks: Iterable[int],
        limits: Mapping[str, float] | None = None,
        counts: str = "step",
    ) -> None:
        """`counts`: what the run counts, to say where it stands."""
        self._limits, self._counts = {**LIMITS, **(limits or {})}, counts
        now = time.monotonic()
        self._watched = [
            _Watched(rank, heartbeat_path(attempt_dir, rank=rank, incarnation=incarnation), now) for rank in ranks
        ]
        self._all_in_init: float | None = None
        self._looked = now

    def look(self, now: float | None = None) -> Hang | None:
        """Read every heartbeat; the hang that they show, if any."""
        now = time.monotonic() if now is None else now
        self._leave_out(now - self._looked - HELD_SECONDS)
        self._looked = now
        for watched in self._watched:
            watched.look(now)
        if self._all_in_init is None and all(watched.phase != "start" for watched in self._watched):
            self._all_in_init = now
        behind = self._behind()
        if not behind or not all(self._overdue(watched, now) for watched in behind):
            return None
        longest = max(behind, key=lambda watched: now - watched.changed)
        ranks = sorted(watched.rank for watched in behind)
        silent = now - longest.changed
        return Hang(ranks, len(self._watched), longest.phase, max(longest.step, 0), silent, self._counts)

    def _leave_out(self, seconds: float) -> None:
        """So long nobody looked."""
        if seconds > 0:
            for watched in self._watched:
                watched.changed += seconds
            if self._all_in_init is not None:
                self._all_in_init += seconds

    @property
    def has_stepped(self) -> bool:
        """Whether every rank has begun its second step: then the start is over."""
        return all(watched.beat is not None and watched.beat.begun > 1 for watched in self._watched)

    def _behind(self) -> list[_Watched]:
        """The ranks at the lowest step. One that has ended its work waits for nobody and holds up nobody."""
        running = [watched for watched in self._watched if watched.phase != "end"]
        if not running:
            return list(self._watched)
        lowest = min(watched.step for watched in running)
        return [watched for watched in running if watched.step == lowest]

    def _overdue(self, watched: _Watched, now: float) -> bool:
        since = watched.changed
        if watched.phase == "init":
            if self._all_in_init is None:
                return False  # somebody is still importing; that one's own limit counts
            since = max(since, self._all_in_init)
        return now - since > self._limit(watched)

    def _limit(self, watched: _Watched) -> float:
        if watched.phase != "step":
            return self._limits.get(watched.phase, NEVER)
        if not watched.is_armed:
            return self._limits["compile"]
        return max(self._limits["step"], MEDIAN_FACTOR * median(watched.durations or [0.0]))


def behind_in_collectives(flight: Path, *, incarnation: int, ranks: list[int]) -> list[int]:
    """The ranks stuck at the same step that are most collectives behind their groups, by their flight recorders.

    Where some have left a record and others could not, it is those others: a process that still answers only waits.
    """
    begun = {
        rank: counts for rank in ranks if (counts := _collectives(flight / f"{incarnation}.{rank}.json")) is not None
    }
    if not begun:
        return ranks
    most: dict[str, int] = {}
    for counts in begun.values():
        most.update({group: count for group, count in counts.items() if count > most.get(group, 0)})
    # Within each group: a pipeline's stages, say, have their own, in which they begin more or fewer.
    lag = {rank: sum(most[group] - count for group, count in counts.items()) for rank, counts in begun.items()}
    return [rank for rank in ranks if rank not in begun] or [rank for rank in lag if lag[rank] == max(lag.values())]


def _collectives(path: Path) -> dict[str, int] | None:
    """How many collectives a rank has begun in each of its groups, as torch's flight recorder tells.

    The same group counts NCCL's and gloo's apart.
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
