"""Meet the node's partners, one a turn; all nodes together wait long for a node that does not come, and only once.

Waiting in turn would delay every node by minutes for each partner that died, and the delayed ones would miss theirs.
"""

from __future__ import annotations

import time
from pathlib import Path

from training.burnin.meeting import Meeting

PARTNER_WAIT_S = 300.0
ABSENT_WAIT_S = 5.0  # for a node for which another one waited in vain, and which has not come since


class Partners:
    """The other nodes of a burn-in, as this node meets them."""

    def __init__(self, folder: Path, node: str) -> None:
        self.folder, self.node = folder, node
        self.absent = Meeting(folder / "absent")

    def meet(self, partner: str, turn: Meeting, text: str) -> str | None:
        """Exchange texts with the partner in a turn; None if it does not come."""
        began = time.monotonic()

        def is_given_up() -> bool:
            return time.monotonic() - began >= ABSENT_WAIT_S and self.absent.has(partner)

        self.absent.withdraw(self.node)  # it is here
        found = turn.meet(partner, me=self.node, text=text, until=began + PARTNER_WAIT_S, is_given_up=is_given_up)
        if found is None:
            self.absent.publish(partner, self.node)
        return found

    def turn(self, cycle: int, number: int) -> Meeting:
        """Return the folder of a turn, after removing what this node left in the cycle before.

        Each turn has its own: nodes list it again and again, so it must stay small.
        """
        self._folder(cycle - 1, number).withdraw(self.node, f"{self.node}.store")
        return self._folder(cycle, number)

    def _folder(self, cycle: int, number: int) -> Meeting:
        return Meeting(self.folder / "turns" / f"{cycle}.{number}")
