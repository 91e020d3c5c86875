"""Connect workers to a broker that may go away, and reconnect them.

Celery waits 2, 4, 6 … 30 s between attempts, and no setting changes that: after five minutes without Redis its workers
are away for up to half a minute longer than Redis is. An attempt costs one `connect`, so this module retries at least
every second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kombu
from celery.app.amqp import AMQP

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 1.0


class Connection(kombu.Connection):
    """A connection to the broker that is retried every second instead of at growing intervals.

    Celery logs three lines in its `errback`, which is called only for the first failure of an outage.
    """

    def ensure_connection(
        self, errback: Callable[..., object] | None = None, *args: Any, **options: Any
    ) -> kombu.Connection:
        first = iter([errback] if errback else [])

        def once(*about: object) -> None:
            for report in first:
                report(*about)

        options = {
            "interval_start": FIRST_RETRY_S,
            "interval_step": FIRST_RETRY_S,
            "interval_max": MAX_RETRY_S,
            **options,
        }
        return super().ensure_connection(once, *args, **options)

    def get_transport_cls(self) -> type[Any]:
        from kombu.transport import redis  # only where something connects

        from portal.redis_transport import RedisTransport

        found: type[Any] = super().get_transport_cls()
        return RedisTransport if found is redis.Transport else found


class Broker(AMQP):
    """Celery's broker interface with the connection above."""

    Connection = Connection
