"""Compare the drills of a game day with the last ones of the same faults on the same partition, for pages and REST."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jobs.gameday.faults import FAULTS
from jobs.models import Drill, GameDay

State = Drill.DrillState


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
    drills = list(game_day.drills.select_related("game_day", "job__project"))
    return [DrillReport(drill, _earlier(drill)) for drill in drills]


def counts(drills: list[Drill]) -> Mapping[str, int]:
    """Return how many drills are in each state."""
    return {state.value: sum(drill.state == state for drill in drills) for state in State}


def _earlier(drill: Drill) -> Drill | None:
    tried = Drill.objects.filter(
        fault=drill.fault, pk__lt=drill.pk, game_day__partition=drill.game_day.partition,
        state__in=(State.PASSED, State.FAILED),
    )  # fmt: skip
    return tried.select_related("game_day").order_by("-pk").first()
