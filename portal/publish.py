"""Publish messages to sockets: one per topic on Redis, where each web process's hub listens. Losing one is harmless."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import cache

import redis
from django.conf import settings

logger = logging.getLogger(__name__)

_RETRY_S = 2.0
_silent_until = 0.0


@cache
def connection() -> redis.Redis:
    """Return a connection to Redis for messages that may be lost."""
    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=1.0, socket_connect_timeout=1.0)


def publish(messages: Mapping[str, bytes]) -> None:
    """Publish, if Redis is available. Without it sockets go stale and reload at their heartbeat; nothing is lost."""
    global _silent_until
    if time.monotonic() < _silent_until:
        return
    try:
        with connection().pipeline(transaction=False) as pipe:
            for topic, message in messages.items():
                pipe.publish(topic, message)
            pipe.execute()
    except (redis.RedisError, OSError) as error:
        _silent_until = time.monotonic() + _RETRY_S
        logger.warning("Live updates pause: Redis does not answer (%s)", error)
