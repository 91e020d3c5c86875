"""Store how long a tick of the follower took in Redis for /metrics, which another process serves."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import redis
from django.conf import settings

from portal.publish import connection

KEY = "vigil:follower"


def run_measured(tick: Callable[[], bool]) -> bool:
    """Run one tick and store its duration, unless /metrics is off. Return whether this process ran the tick."""
    began = time.perf_counter()
    was_us = tick()
    if was_us and settings.VIGIL_METRICS_TOKEN:
        with suppress(redis.RedisError, OSError), connection().pipeline(transaction=False) as pipe:
            pipe.hset(KEY, mapping={"seconds": time.perf_counter() - began, "at": time.time()})
            pipe.hincrby(KEY, "ticks", 1)
            pipe.execute()
    return was_us
