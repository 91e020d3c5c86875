"""Store what a drill has shown so far, and how it ended. Two workers may do it: only a running drill changes."""

from __future__ import annotations

import logging

from jobs.models import Drill

logger = logging.getLogger(__name__)

State = Drill.DrillState
_RESULTS = (
    "node", "driver", "slurm", "entry", "planted_at", "noticed_s", "verdict_s", "cause", "is_cause_right", "action",
    "is_action_right", "in_service_s", "training_again_s", "are_losses_identical",
)  # fmt: skip


def store(drill: Drill, state: Drill.DrillState, detail: str = "") -> None:
    """Store the drill's results; `state` is RUNNING while it goes on."""
    results = {name: getattr(drill, name) for name in _RESULTS}
    rows = Drill.objects.filter(pk=drill.pk, state=State.RUNNING)
    if rows.update(state=state, detail=detail, **results) and state != State.RUNNING:
        logger.info("%s: %s. %s", drill, state, detail)
