"""Start a game day of one fault, and play the agent that plants it."""

from __future__ import annotations

import time
from typing import Any

from jobs.gameday import start as game_days
from jobs.gameday.advance import advance
from jobs.models import Drill
from portal.models import User
from tests.nodes.remediation.cluster import Lab

NODE = "dgx-01"


class Fault:
    """A game day with a single fault, and the agent that plants it."""

    def __init__(self, lab: Lab, ops: User, fault: str) -> None:
        self.lab, self.game_day = lab, game_days.start(ops, "canaries", "gpu", [fault])

    @property
    def drill(self) -> Drill:
        return self.game_day.drills.get()

    @property
    def request(self) -> dict[str, Any] | None:
        """Return what the answer to the agent's next post requests."""
        answer = self.lab.machine(NODE).post()
        return dict(answer.json()).get("plant")  # type: ignore[no-any-return]

    def plant(self, *, lasts_s: float = 60) -> dict[str, Any]:
        """Do what the agent does; return the fields that mark what follows from it."""
        request = self.request
        assert request is not None
        mark = {"planted": request["id"], "planted_until": time.time() + lasts_s}
        self.lab.happens("fault.planted", NODE, fault=request["fault"], text="Planted.", **mark)
        return mark

    def xid(self, **mark: Any) -> None:
        self.lab.seq += 1
        gpu, seq = self.lab.machine(NODE).gpus[0], self.lab.seq
        about = {"xid": 79, "seq": seq, "text": f"GPU has fallen off the bus. {'x' * seq}", "gpu": gpu}
        self.lab.happens("xid", NODE, **about, **mark)

    def advance(self, times: int = 1) -> None:
        for _ in range(times):
            advance()
            self.lab.step()
