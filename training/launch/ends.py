"""How every rank of this node ended: told once an incarnation, as an event and in a file that outlives the launcher."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.launch.attempt import Attempt
from training.launch.incarnation import Incarnation
from training.launch.kept import Kept
from training.launch.plan import Plan
from training.launch.ranks import Rank

FOLDER = "ends"
MOST_TOLD = 128  # ranks of one event; the file has all of them
VERSION = 1


class Ends:
    """`begin` before the ranks of an incarnation start, `tell` once none is left, `finish` with the attempt."""

    def __init__(self, plan: Plan, attempt: Attempt) -> None:
        self._plan = plan
        self._kept = Kept(attempt.folder, f"{FOLDER}/.reserve.{plan.node_rank}")

    def begin(self) -> None:
        self._kept.reserve()

    def tell(self, incarnation: Incarnation, ranks: Sequence[Rank]) -> dict[str, Any]:
        """Write this node's file, and answer what its event says: of many ranks those that failed first."""
        plan, everybody = self._plan, [told(rank) for rank in ranks]
        about = {"incarnation": incarnation.number, "node": plan.node, "node_rank": plan.node_rank}
        name = Path(FOLDER) / f"{incarnation.number}.{plan.node_rank}.json"
        self._kept.write(name, json.dumps({"version": VERSION, **about, "ranks": everybody}))
        first = sorted(everybody, key=_of_interest)[:MOST_TOLD]
        return {**about, "ranks": first, "left_out": len(everybody) - len(first)}

    def finish(self) -> None:
        self._kept.release()


def told(rank: Rank) -> dict[str, Any]:
    """One rank's end; one that nothing could end has none."""
    found: dict[str, Any] = {"rank": rank.rank, "pid": rank.process.pid}
    if (end := rank.exit) is None:
        return found
    found |= {"exit_code": end.exit_code, "signal": end.signal, "ended_at": round(end.ended_at, 3)}
    return found | {"seconds": round(end.at - rank.began, 3), "peak_mib": end.peak_mib, "by_us": end.by_us}


def _of_interest(told: dict[str, Any]) -> tuple[bool, float]:
    """Ends of their own, and bad ones, come first."""
    return told.get("exit_code") == 0 or bool(told.get("by_us")), told.get("ended_at") or 0.0
