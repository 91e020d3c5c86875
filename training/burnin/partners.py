"""Exchange texts with the node's partners, one a round; nodes wait long for an absent node only once, all together.

Waiting in turn would delay every node by minutes for each partner that died, and the delayed ones would miss theirs.
"""

from __future__ import annotations

import time
from pathlib import Path

from training.burnin.rendezvous import FileRendezvous

PARTNER_WAIT_S = 300.0
ABSENT_WAIT_S = 5.0  # for a node for which another one waited in vain, and which has not arrived since


class Partners:
    """The other nodes of a burn-in, as this node's partners."""

    def __init__(self, folder: Path, node: str) -> None:
        self.folder, self.node = folder, node
        self.absent = FileRendezvous(folder / "absent")

    def exchange(self, partner: str, rendezvous: FileRendezvous, text: str) -> str | None:
        """Exchange texts with the partner in a round; None if it does not arrive."""
        began = time.monotonic()

        def should_give_up() -> bool:
            return time.monotonic() - began >= ABSENT_WAIT_S and self.absent.has(partner)

        self.absent.withdraw(self.node)  # it is here
        until = began + PARTNER_WAIT_S
        found = rendezvous.exchange(partner, me=self.node, text=text, until=until, should_give_up=should_give_up)
        if found is None:
            self.absent.publish(partner, self.node)
        return found

    def enter_round(self, cycle: int, round_: int) -> FileRendezvous:
        """Return the folder of a round, after removing what this node left in the cycle before.

        Each round has its own: nodes list it again and again, so it must stay small.
        """
        self._folder(cycle - 1, round_).withdraw(self.node, f"{self.node}.store")
        return self._folder(cycle, round_)

    def _folder(self, cycle: int, round_: int) -> FileRendezvous:
        return FileRendezvous(self.folder / "turns" / f"{cycle}.{round_}")
