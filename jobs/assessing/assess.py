"""Compute what jobs show about nodes and programs, and store it for health rules; every few minutes."""

from __future__ import annotations

from datetime import datetime

from django.utils import timezone

from jobs import lease
from jobs.assessing import offenders, program_notices, step_times
from nodes.monitoring import assessments

SOUND_NODE = {"is_node": False, "programs": 0, "owners": 0, "programs_chance": 1.0}
USUAL_PACE = {"ratio": 1.0, "programs": 0, "slow_programs": 0, "slow_share": 0.0, "attempts": 0, "other_nodes": 0}
SOUND_PROGRAM = {"failures": 0, "nodes": 0, "share_of_one_node": 0.0}


def assess(now: datetime | None = None) -> None:
    """Assess nodes and programs, unless another process does."""
    now = now or timezone.now()
    lock = lease.take("assessing")
    if lock is None:
        return
    try:
        assessments.replace("repeat_failures", offenders.failing_nodes(now), SOUND_NODE, now)
        assessments.replace("program_failures", offenders.failing_programs(now), SOUND_PROGRAM, now)
        program_notices.notify_owners(now)  # of what the rules made of the last assessment
        step_times.measure(now)
        assessments.replace("step_time", step_times.paces(now), USUAL_PACE, now)
    finally:
        lock.release()
