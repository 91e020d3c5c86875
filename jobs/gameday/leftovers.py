"""Clear what game days planted and no drill follows any more.

A drill clears what it planted. But a health rule may be later than the drill waits, an agent may report a fault after
its request was withdrawn, and a drill may be deleted with its project: the node would stay drained.
"""

from __future__ import annotations

from datetime import timedelta

from django.utils import timezone

from jobs.gameday.results import State
from jobs.models import Drill
from nodes.models import HealthEntry
from nodes.remediation import inbox

MIN_EVIDENCE_AGE = timedelta(minutes=5)
"""How old the newest evidence must be: no planted fault lasts longer (nodes.agent.planting)."""
MAX_PER_RUN = 50


def clear_leftovers() -> None:
    """Clear planted findings whose evidence is old and whose drills do not run; their drains are then undone."""
    before = timezone.now() - MIN_EVIDENCE_AGE
    entries = list(
        HealthEntry.objects.active().filter(is_planted=True, last_seen__lt=before).order_by("pk")[:MAX_PER_RUN]
    )
    if not entries:
        return
    running = set(Drill.objects.filter(state=State.RUNNING).values_list("pk", flat=True))
    for entry in entries:
        if running.isdisjoint(observation.fields.get("planted") for observation in entry.observations()):
            inbox.clear(None, entry.pk, "Injected by a game day that is over.")
