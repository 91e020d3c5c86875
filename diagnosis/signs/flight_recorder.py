"""Read flight recorders' dumps: which collective operations each rank has begun, and which rank is behind.

PyTorch writes them where TORCH_NCCL_DUMP_ON_TIMEOUT is set (torch.distributed.flight_recorder).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from diagnosis.logs.prefixes import Prefix
from diagnosis.signs.sign import Sign
from vigil_core import untrusted

MAX_BYTES = 16 << 20  # of one dump, or of one file of stacks
MAX_RANKS = 1_000_000
MAX_ENTRIES = 8_192  # of one dump; torch keeps 2,000, of each library
NEWEST = 128  # of them in one group


@dataclass(slots=True)
class FlightRecord:
    """The collective operations that one rank has started: a description by (group, sequence number)."""

    name: str
    rank: int
    started: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def last_numbers(self) -> dict[str, int]:
        """Return the highest sequence number by group."""
        found: dict[str, int] = {}
        for group, number in self.started:
            found[group] = max(found.get(group, 0), number)
        return found


def parse_flight(name: str, text: str) -> FlightRecord | None:
    """Return a dump in JSON with the newest operations of each group, or None if it is invalid.

    Nothing is ever unpickled.
    """
    started: dict[str, dict[int, str]] = {}
    try:
        dump = json.loads(text)
        rank = untrusted.count(dump.get("rank", _number_in(name)), MAX_RANKS)
        for entry in dump["entries"][-MAX_ENTRIES:]:
            operation = str(entry.get("profiling_name", "?"))
            group = f"{operation.partition(':')[0]} {entry.get('process_group', '')}"
            sizes = json.dumps(entry.get("input_sizes", ""))[:200]
            number = untrusted.count(entry["collective_seq_id"])
            if number is not None:
                calls = started.setdefault(untrusted.plain(group[:200]), {})
                calls[number] = untrusted.plain(f"{operation.rpartition(':')[2]} of {sizes}"[:400])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if rank is None:
        return None
    newest = {(group, number): calls[number] for group, calls in started.items() for number in sorted(calls)[-NEWEST:]}
    return FlightRecord(name, rank, newest)


def _number_in(name: str) -> int:
    found = re.findall(r"\d+", name.rpartition("/")[2])
    return int(found[-1][:6]) if found else -1


def signs_of_flights(flights: Sequence[FlightRecord]) -> list[Sign]:
    """Return a sign for ranks that called something else at the same place of a group, else for ranks behind."""
    if len(flights) < 2:
        return []
    signs: list[Sign] = []
    by_place: dict[tuple[str, int], dict[int, str]] = {}
    for flight in flights:
        for place, what in flight.started.items():
            by_place.setdefault(place, {})[flight.rank] = what
    for place, called in sorted(by_place.items(), key=lambda item: (item[0][1], item[0][0])):
        usual, count = Counter(called.values()).most_common(1)[0]
        odd = [rank for rank, what in called.items() if what != usual]
        if odd and count >= len(odd):
            rank = min(odd)
            text = f"rank {rank} called {called[rank]}, the others {usual} (collective {place[1]} of group {place[0]})"
            name = next(flight.name for flight in flights if flight.rank == rank)
            signs.append(
                Sign(
                    name,
                    1,
                    text,
                    cause="collective.mismatch",
                    role="root",
                    prefix=Prefix(rank=rank),
                    source_kind="flight",
                )
            )
            break
    if signs:
        return signs
    most: dict[str, int] = {}
    for flight in flights:
        for group, number in flight.last_numbers.items():
            most[group] = max(most.get(group, 0), number)
    lag = {
        flight.rank: sum(most[group] - number for group, number in flight.last_numbers.items()) for flight in flights
    }
    worst = max(lag.values())
    behind = sorted(rank for rank, count in lag.items() if count == worst)
    if worst and len(behind) < len(flights):
        name = next(flight.name for flight in flights if flight.rank == behind[0])
        text = f"rank {behind[0]} is {worst} collectives behind the others"
        signs.append(
            Sign(
                name,
                1,
                text,
                cause="collective.timeout",
                role="confirmation",
                prefix=Prefix(rank=behind[0]),
                source_kind="flight",
            )
        )
    return signs
