"""What a tick of the follower took, left in Redis for /metrics: another process answers there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import redis
from django.conf import settings

from portal.publish import connection

KEY = "vigil:follower"


def measured(tick: Callable[[], bool]) -> bool:
    """One tick; whether it was us. Where nobody may ask for it, nothing is written."""
    began = time.perf_counter()
    was_us = tick()
    if was_us and settings.VIGIL_METRICS_TOKEN:
        with suppress(redis.RedisError, OSError), connection().pipeline(transaction=False) as pipe:
            pipe.hset(KEY, mapping={"seconds": time.perf_counter() - began, "at": time.time()})
            pipe.hincrby(KEY, "ticks", 1)
            pipe.execute()
    return was_us
