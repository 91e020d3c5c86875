"""Compare the drills of a game day with the last ones of the same faults on the same partition, for pages and REST."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.gameday.faults import FAULTS
from jobs.models import Drill, GameDay

State = Drill.DrillState
MOST_EARLIER = 200
"""Drills to look back for the last one of each fault: some thirty game days."""


@dataclass(frozen=True)
class DrillReport:
    """A drill with the one before it, if there is one."""

    drill: Drill
    earlier: Drill | None

    @property
    def title(self) -> str:
        fault = FAULTS.get(self.drill.fault)
        return fault.title if fault else self.drill.fault

    @property
    def is_worse(self) -> bool:
        """Return whether it failed and passed the last time."""
        return self.earlier is not None and (self.drill.state, self.earlier.state) == (State.FAILED, State.PASSED)

    @property
    def changes(self) -> list[str]:
        """Return which software differs from the last time."""
        if self.earlier is None:
            return []
        pairs = (
            ("Vigil", self.earlier.game_day.version, self.drill.game_day.version),
            ("driver", self.earlier.driver, self.drill.driver),
        )
        return [f"{name} {before or 'unknown'} → {now or 'unknown'}" for name, before, now in pairs if before != now]


def drill_reports(game_day: GameDay) -> list[DrillReport]:
    """Return the drills in their order, each with the last one of its fault that was tried on this partition."""
    tried = Drill.objects.filter(
        game_day__partition=game_day.partition, game_day__lt=game_day.pk, state__in=(State.PASSED, State.FAILED)
    )
    earlier: dict[str, Drill] = {}
    for drill in tried.select_related("game_day").order_by("-pk")[:MOST_EARLIER]:
        earlier.setdefault(drill.fault, drill)
    return [DrillReport(drill, earlier.get(drill.fault)) for drill in game_day.drills.select_related("game_day")]
