"""Read the plan of a burn-in, which the portal writes and every node follows."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 1 << 20


class UnreadablePlan(ValueError):
    """Raised if the plan cannot be followed; the message says why."""


@dataclass(frozen=True)
class BurnInPlan:
    """The nodes to test, for how long, and what to test besides GPUs and memory.

    `mounts`: folders that must be reachable. `scratch`: the folder on each node to write to and read from.
    """

    nodes: tuple[str, ...]
    seconds: float
    mounts: tuple[str, ...]
    scratch: str

    @property
    def rounds(self) -> int:
        """Return after how many rounds every node has met every other: n - 1, or n if n is odd, the least possible."""
        count = len(self.nodes)
        return (count - 1) | 1 if count > 1 else 0

    def partner_of(self, node: str, round_: int) -> str | None:
        """Return the node's partner in a round; None if it has none in this one.

        The circle method (Kirkman 1847): of an odd number of places, two meet in round r if their numbers add up to r
        modulo that number. One place is left over; it meets the node beyond the circle, which exists if n is even. No
        two pairs of a round share a node, so they do not disturb each other.
        """
        circle, place = self.rounds, self.nodes.index(node)
        other = (round_ - place) % circle if place < circle else round_ * (circle + 1) // 2 % circle
        other = circle if other == place else other
        return self.nodes[other] if other < len(self.nodes) else None


def read_plan(run: Path) -> BurnInPlan:
    """Read `portal/plan.json` below the run directory. Raises OSError or UnreadablePlan."""
    with open(run / "portal" / "plan.json", encoding="utf-8") as file:
        try:
            document = json.loads(file.read(MAX_BYTES))
            return BurnInPlan(
                nodes=tuple(map(str, document["nodes"])),
                seconds=float(document["seconds"]),
                mounts=tuple(map(str, document["mounts"])),
                scratch=str(document["scratch"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise UnreadablePlan(f"{file.name} is not the plan of a burn-in ({error!r}).") from None


def node_name(plan: BurnInPlan) -> str:
    """Return this node's name in the plan: as the scheduler calls it, else by its place in the allocation.

    The local scheduler plays nodes under names of its own; with one node in the plan it can only be that one.
    """
    for name in (os.environ.get("SLURMD_NODENAME", ""), platform.node(), platform.node().partition(".")[0]):
        if name in plan.nodes:
            return name
    if len(plan.nodes) == 1:
        return plan.nodes[0]
    raise UnreadablePlan(f"This node is none of {', '.join(plan.nodes[:8])}.")
