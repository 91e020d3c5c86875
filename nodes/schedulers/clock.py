"""Compare this machine's clock with the scheduler's."""

from __future__ import annotations

import time
from collections.abc import Callable


def offset_s(clock: Callable[[], float | None]) -> float | None:
    """Return the fewest seconds by which this machine's clock is ahead; None if the scheduler reports no time.

    Negative if it is behind. Slurm reports whole seconds and the reply takes time: an offset within that counts as 0.
    """
    sent_at = time.time()
    scheduler_time = clock()
    received_at = time.time()
    if scheduler_time is None:
        return None
    return max(0.0, sent_at - scheduler_time - 1) + min(0.0, received_at - scheduler_time)
