"""Calculate what a failure cost, from the work and allocated time that were lost."""

from __future__ import annotations

from datetime import datetime

from jobs.lost_work import LostWork
from jobs.presenting.postmortems.cost import Cost


def measure(
    lost: LostWork, *, step: int | None, gpus: int, caught_up_at: datetime | None, price: float | None, currency: str
) -> Cost:
    """Calculate the cost of a failure.

    `step` is the last step of the attempt, `gpus` the number of GPUs per node, `price` the price of a GPU-hour if set.
    """
    moments, saved_step = lost.moments, lost.checkpoint.step if lost.checkpoint else 0
    hours = lost.node_s * gpus / 3600 if gpus else None
    caught_up = None if caught_up_at is None else max(0.0, (caught_up_at - moments.noticed_at).total_seconds())
    return Cost(
        steps=max(0, step - saved_step) if step is not None else None,
        lost_seconds=lost.seconds,
        gpu_hours=hours,
        money=hours * price if hours is not None and price is not None else None,
        currency=currency,
        detect_seconds=moments.detect_s,
        resume_seconds=moments.recover_s,
        catch_up_seconds=caught_up,
        is_awaited=lost.following is not None and not lost.is_over,
    )
