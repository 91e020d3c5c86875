"""Report how every rank of this node ended, once per incarnation.

As an event, and as a file that outlives the launcher.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.launch.attempt import Attempt
from training.launch.disk_reserve import DiskReserve
from training.launch.incarnation import Incarnation
from training.launch.plan import LaunchPlan
from training.launch.ranks import Rank

FOLDER = "ends"
MAX_EVENT_RANKS = 128  # in one event; the file has all ranks
VERSION = 1


class ExitReport:
    """`begin` before the ranks of an incarnation start, `write` once all have ended, `finish` with the attempt."""

    def __init__(self, plan: LaunchPlan, attempt: Attempt) -> None:
        self._plan = plan
        self._reserve = DiskReserve(attempt.folder, f"{FOLDER}/.reserve.{plan.node_rank}")

    def begin(self) -> None:
        self._reserve.reserve()

    def write(self, incarnation: Incarnation, ranks: Sequence[Rank]) -> dict[str, Any]:
        """Write this node's file and return the event's content: of many ranks, those that failed first."""
        plan, records = self._plan, [exit_record(rank) for rank in ranks]
        header = {"incarnation": incarnation.number, "node": plan.node, "node_rank": plan.node_rank}
        name = Path(FOLDER) / f"{incarnation.number}.{plan.node_rank}.json"
        self._reserve.write(name, json.dumps({"version": VERSION, **header, "ranks": records}))
        first = sorted(records, key=_failures_first)[:MAX_EVENT_RANKS]
        return {**header, "ranks": first, "left_out": len(records) - len(first)}

    def finish(self) -> None:
        self._reserve.release()


def exit_record(rank: Rank) -> dict[str, Any]:
    """Return how one rank ended; without an exit for a rank that could not be killed."""
    record: dict[str, Any] = {"rank": rank.rank, "pid": rank.process.pid}
    if (exit_ := rank.exit) is None:
        return record
    record |= {"exit_code": exit_.exit_code, "signal": exit_.signal, "ended_at": round(exit_.ended_at, 3)}
    return record | {"seconds": round(exit_.at - rank.began_at, 3), "peak_mib": exit_.peak_mib, "by_us": exit_.by_us}


def _failures_first(record: dict[str, Any]) -> tuple[bool, float]:
    """Sort key: ranks that failed by themselves first, in the order in which they ended."""
    return record.get("exit_code") == 0 or bool(record.get("by_us")), record.get("ended_at") or 0.0
