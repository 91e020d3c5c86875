"""Compare this machine's clock with the scheduler's."""

from __future__ import annotations

import time
from collections.abc import Callable


def offset_s(clock: Callable[[], float | None]) -> float | None:
    """Return by how many seconds this machine is ahead, at least; None if the scheduler does not tell the time.

    It may be behind: then the result is negative. Slurm tells whole seconds, and the answer takes time: what these
    explain counts as 0.
    """
    before = time.time()
    theirs = clock()
    after = time.time()
    if theirs is None:
        return None
    return max(0.0, before - theirs - 1) + min(0.0, after - theirs)
