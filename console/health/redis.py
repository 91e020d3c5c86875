"""Check that Redis answers: without it nothing is queued, and pages are not updated live."""

from __future__ import annotations

from collections.abc import Iterator

from django.conf import settings
from redis.exceptions import RedisError

from console.health.finding import Finding
from portal.publish import connection


def check() -> Iterator[Finding]:
    try:
        connection().ping()
    except (RedisError, OSError) as error:
        yield Finding(
            "redis",
            "redis",
            "error",
            "Redis does not answer: jobs are neither started nor followed.",
            f"{' '.join(str(error).split())[:300].rstrip('.')}.",
            f"vigil up restarts its own Redis after {settings.VIGIL_UNRESPONSIVE_SECONDS:g} s; its log is"
            " $VIGIL_HOME/logs/redis.log. A server of yours: restart it, and look at its log and memory.",
        )
