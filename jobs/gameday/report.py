"""Compare the drills of a game day with the last ones of the same faults on the same partition, for pages and REST."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jobs.gameday.faults import FAULTS
from jobs.gameday.judge import SOFTWARE
from jobs.models import Drill, GameDay
from nodes.models import Agent
from vigil_core import untrusted
from vigil_core.installation import version

State = Drill.DrillState
MAX_EARLIER = 200
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
        return _changes(_software_of(self.earlier), _software_of(self.drill)) if self.earlier else []

    @property
    def software(self) -> str:
        """Return the versions on the drill's node: "Slurm 24.11.5, driver 570.86"; "" if no agent reported them."""
        found = _software_of(self.drill)
        return ", ".join(f"{name} {found[name]}" for name in ("Slurm", "driver") if found[name])


def upgrades_since(game_day: GameDay) -> list[str]:
    """Return which software was upgraded since the game day, so that another one is due."""
    drills = list(game_day.drills.exclude(node="").select_related("game_day"))
    agents = {agent.node: agent for agent in Agent.objects.filter(node__in={drill.node for drill in drills})}
    upgrades: dict[str, None] = {}
    for drill in drills:
        now = {"Vigil": version()}
        if (agent := agents.get(drill.node)) is not None:
            now |= {name: untrusted.line(agent.facts.get(part), 64) for name, part in _PARTS.items()}
        upgrades |= dict.fromkeys(_changes(_software_of(drill), now))
    return list(upgrades)


def _software_of(drill: Drill) -> dict[str, str]:
    return {"Vigil": drill.game_day.version, "Slurm": drill.slurm, "driver": drill.driver}


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what differs; a version that is not known now says nothing."""
    return [f"{name} {before[name] or 'unknown'} → {new}" for name, new in now.items() if new and before[name] != new]


_PARTS = dict(zip(("driver", "Slurm"), SOFTWARE, strict=True))


def drill_reports(game_day: GameDay) -> list[DrillReport]:
    """Return the drills in their order, each with the last one of its fault that was tried on this partition."""
    tried = Drill.objects.filter(
        game_day__partition=game_day.partition, game_day__lt=game_day.pk, state__in=(State.PASSED, State.FAILED)
    )
    earlier: dict[str, Drill] = {}
    for drill in tried.select_related("game_day").order_by("-pk")[:MAX_EARLIER]:
        earlier.setdefault(drill.fault, drill)
    return [DrillReport(drill, earlier.get(drill.fault)) for drill in game_day.drills.select_related("game_day")]
