"""Keep a worker that cannot acknowledge a message from waiting for that message for ever.

kombu (5.7) forgets a message only after Redis has confirmed its acknowledgement. If Redis dies between the end of a
task and that, a worker that takes one message at a time believes that it still holds one: it asks for no other, and
notices no outage either, until it is restarted. Here it forgets the message in any case. Redis delivers it again after
the visibility time-out, as after any worker's death.
"""

from __future__ import annotations

from kombu.transport import redis, virtual


class RedisQoS(redis.QoS):
    """Messages that a channel has taken and not settled yet."""

    def ack(self, delivery_tag: str) -> None:
        try:
            super().ack(delivery_tag)
        except Exception:
            virtual.QoS.ack(self, delivery_tag)
            raise

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        try:
            super().reject(delivery_tag, requeue)
        except Exception:
            virtual.QoS.ack(self, delivery_tag)
            raise


class RedisChannel(redis.Channel):
    """A channel that counts its messages as above."""

    QoS = RedisQoS


class RedisTransport(redis.Transport):
    """Redis, with channels that count as above."""

    Channel = RedisChannel
