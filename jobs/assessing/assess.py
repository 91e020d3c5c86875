"""Compute what jobs show about nodes and programs, and store it for health rules; every few minutes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

from django.utils import timezone

from jobs import lease
from jobs.assessing import offenders, program_notices, step_times
from nodes.monitoring import assessments

logger = logging.getLogger(__name__)

SOUND_NODE = {"is_node": False, "programs": 0, "owners": 0, "programs_chance": 1.0}
SOUND_PROGRAM = {"failures": 0, "nodes": 0, "share_of_one_node": 0.0}
UNKNOWN_PACE = dict.fromkeys(step_times.FIELDS)
"""Nothing recent to compare says nothing about the node: jobs may avoid it because it was slow."""


def assess(now: datetime | None = None) -> None:
    """Assess nodes and programs, unless another process does. A part that fails does not stop the others."""
    now = now or timezone.now()
    lock = lease.take("assessing")
    if lock is None:
        return
    errors: list[Exception] = []
    try:
        for part in PARTS:
            lock.check()
            try:
                part(now)
            except Exception as error:  # one bad record must not stop the others, time after time
                errors.append(error)
    except lease.LeaseLost:
        logger.warning("lost the lease in the middle of the assessments; the process that has it now continues")
    finally:
        lock.release()
    if errors:
        raise ExceptionGroup("Some assessments failed.", errors)


def _failing_nodes(now: datetime) -> None:
    assessments.replace("repeat_failures", offenders.failing_nodes(now), SOUND_NODE, now)


def _failing_programs(now: datetime) -> None:
    assessments.replace("program_failures", offenders.failing_programs(now), SOUND_PROGRAM, now)


def _paces(now: datetime) -> None:
    assessments.replace("step_time", step_times.paces(now), UNKNOWN_PACE, now)


PARTS: tuple[Callable[[datetime], object], ...] = (
    _failing_nodes,
    _failing_programs,
    program_notices.notify_owners,  # of what the rules made of the last assessment
    step_times.measure,
    _paces,
)
