"""Ask agents to plant faults for a game day, in the answer to their next post, and read what they reported of it.

An agent takes part only if its operator set VIGIL_AGENT_GAMEDAY=yes, which its facts say.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from nodes.models import Agent, NodeEvent
from nodes.telemetry.events import PLANTINGS
from vigil_core import untrusted

OFFERED_FOR = timedelta(seconds=90)
"""How long a request stands: an agent posts every ten seconds."""
CLOCK = timedelta(seconds=60)
"""By how much an agent's clock may differ from ours without being corrected."""


@dataclass(frozen=True)
class PlantReport:
    """An agent's answer to a request: planted at a moment, until another, or refused."""

    at: datetime
    until: datetime | None
    """None: refused."""
    text: str


def takes_faults(agent: Agent) -> bool:
    return isinstance(agent.facts, dict) and agent.facts.get("game_day") is True


def request_fault(agent: Agent, number: int, fault: str, seconds: float) -> bool:
    """Ask the agent to plant a fault; return False while it is asked for another. The caller holds its row lock."""
    wanted = wanted_of(agent)
    if wanted is not None and wanted["id"] != number:
        return False
    expires_at = (timezone.now() + OFFERED_FOR).timestamp()
    agent.plant = {"id": number, "fault": fault, "seconds": seconds, "expires_at": expires_at}
    agent.save(update_fields=["plant"])
    return True


def withdraw(node: str, number: int) -> None:
    """Take the request back, if it still stands."""
    Agent.objects.filter(node=node, plant__id=number).update(plant={})


def wanted_of(agent: Agent) -> dict[str, Any] | None:
    """Return the request for the agent as the protocol has it; None if there is none, or its time is over."""
    plant = agent.plant if isinstance(agent.plant, dict) else {}
    expires_at = untrusted.moment(plant.get("expires_at"))
    if expires_at is None or expires_at < timezone.now():
        return None
    return {name: plant.get(name) for name in ("id", "fault", "seconds")}


def report_of(node: str, number: int, since: datetime, seconds: float) -> PlantReport | None:
    """Return what the agent answered to a request of this moment for so many seconds; None: nothing yet.

    Its times are not believed beyond what the request allows: a drill that waits for their end must end.
    """
    rows = NodeEvent.objects.filter(agent__node=node, kind__in=PLANTINGS, code=number, at__gte=since - CLOCK)
    row = rows.order_by("at").first()
    if row is None:
        return None
    latest = since + OFFERED_FOR + CLOCK
    until = untrusted.moment(row.data.get("planted_until")) if row.kind == "fault.planted" else None
    longest = latest + timedelta(seconds=seconds)
    return PlantReport(min(row.at, latest), until and min(until, longest), row.text)
