"""Live fan-out: one Redis subscriber a web process, a bounded queue a listener (DESIGN §5).

A listener that does not keep up loses what waits for it and is told so: it reads again. It never slows another. What
arrives on a topic goes through the topic's `Relay` once, whatever the number of listeners.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

import redis.asyncio
from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

QUEUE = 256  # messages that may wait for one listener
TICK_S = 1.0
_ACK_S = 2.0
_CONTROL = "vigil:hub"  # always subscribed, so that there is something to read
_BACKOFF_S = (0.1, 0.25, 0.5, 1.0, 2.0)

Item = tuple[str, bytes]  # (audience, message): "" is everyone on the topic


class Relay(Protocol):
    """Makes of what is published on one topic what its listeners get."""

    async def open(self) -> None:
        """Called once, after the subscription stands and before the first listener has joined."""

    def feed(self, message: bytes, audiences: set[str]) -> Iterable[Item]: ...

    def tick(self) -> Iterable[Item]:
        """Called every second."""
        ...


class Plain:
    """Passes on what comes."""

    async def open(self) -> None: ...

    def feed(self, message: bytes, audiences: set[str]) -> Iterable[Item]:
        return (("", message),)

    def tick(self) -> Iterable[Item]:
        return ()


class Listener:
    """One socket's end: a bounded queue."""

    def __init__(self, topic: str, audience: str) -> None:
        self.topic, self.audience = topic, audience
        self._queue: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._missed = False

    def put(self, message: bytes) -> None:
        if len(self._queue) >= QUEUE:
            self.miss()
            return
        self._queue.append(message)
        self._wake()

    def miss(self) -> None:
        """Something was lost; what still waits is no good without it."""
        self._queue.clear()
        self._missed = True
        self._wake()

    async def get(self) -> bytes | None:
        """The next message; None says that some were lost."""
        while True:
            if self._missed:
                self._missed = False
                return None
            if self._queue:
                return self._queue.popleft()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None


class _Topic:
    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.subscribed = asyncio.Event()
        self.opened = asyncio.Lock()
        self.is_open = False
        self.listeners: set[Listener] = set()
        self.audiences: set[str] = set()

    def give(self, items: Iterable[Item]) -> None:
        for audience, message in items:
            for listener in self.listeners:
                if not audience or listener.audience == audience:
                    listener.put(message)


class Hub:
    """Use it within one event loop. It connects with the first listener, and again whenever Redis comes back."""

    def __init__(self, url: str, relay: Callable[[str], Relay] = lambda topic: Plain()) -> None:
        self._url, self._relay = url, relay
        self._topics: dict[str, _Topic] = {}
        self._pubsub: redis.asyncio.client.PubSub | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._subscribing = asyncio.Lock()  # so that leaving and joining a topic reach Redis in their order

    async def join(self, topic: str, *, audience: str = "") -> Listener:
        """A listener that misses nothing published from now on; without Redis it will hear when Redis is back."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._tick())]
        entry = self._topics.get(topic)
        listener = Listener(topic, audience)
        if entry is None:
            entry = self._topics[topic] = _Topic(self._relay(topic))
            entry.listeners.add(listener)
            await self._subscribe(topic)
        entry.listeners.add(listener)
        entry.audiences.add(audience)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(entry.subscribed.wait(), _ACK_S)
        async with entry.opened:
            if not entry.is_open:
                await entry.relay.open()
                entry.is_open = True
        return listener

    async def leave(self, listener: Listener) -> None:
        entry = self._topics.get(listener.topic)
        if entry is None or listener not in entry.listeners:
            return
        entry.listeners.remove(listener)
        entry.audiences = {other.audience for other in entry.listeners}
        if entry.listeners:
            return
        del self._topics[listener.topic]
        async with self._subscribing:
            if self._pubsub is not None and listener.topic not in self._topics:
                with contextlib.suppress(RedisError, OSError):
                    await self._pubsub.unsubscribe(listener.topic)

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _subscribe(self, *topics: str) -> None:
        async with self._subscribing:
            if self._pubsub is not None and topics:
                with contextlib.suppress(RedisError, OSError):  # the reader notices too, and subscribes to all again
                    await self._pubsub.subscribe(*topics)

    async def _read(self) -> None:
        """Read for as long as the process lives, over as many connections as it takes."""
        failures = 0
        while True:
            client = redis.asyncio.Redis.from_url(self._url, socket_connect_timeout=2.0, health_check_interval=15)
            pubsub = client.pubsub()
            try:
                known = set(self._topics)
                await pubsub.subscribe(_CONTROL, *known)
                self._pubsub = pubsub
                await self._subscribe(*(self._topics.keys() - known))
                if failures:
                    logger.info("Live updates go on: Redis is back")
                    self._miss_all()
                failures = 0
                while True:
                    self._take(await pubsub.get_message(timeout=5.0))
            except (RedisError, OSError) as error:
                if not failures:
                    logger.warning("Live updates pause: Redis does not answer (%s)", error)
                self._pubsub = None
                for entry in self._topics.values():
                    entry.subscribed.clear()
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
            finally:
                self._pubsub = None
                with contextlib.suppress(RedisError, OSError):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]
                    await client.aclose()

    def _take(self, message: dict[str, object] | None) -> None:
        if message is None:
            return
        channel = message["channel"]
        entry = self._topics.get(channel.decode() if isinstance(channel, bytes) else str(channel))
        if entry is None:
            return
        if message["type"] == "subscribe":
            entry.subscribed.set()
        elif message["type"] == "message" and isinstance(data := message["data"], bytes):
            try:
                entry.give(entry.relay.feed(data, entry.audiences))
            except Exception:
                logger.exception("A message on %s could not be passed on", channel)

    def _miss_all(self) -> None:
        """Nobody knows what was published while the connection was down."""
        for entry in self._topics.values():
            for listener in entry.listeners:
                listener.miss()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for topic, entry in list(self._topics.items()):
                try:
                    entry.give(entry.relay.tick())
                except Exception:
                    logger.exception("The tick of %s failed", topic)


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = WeakKeyDictionary()


def of_this_process(url: str, relay: Callable[[str], Relay]) -> Hub:
    """The one hub of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _hubs:
        _hubs[loop] = Hub(url, relay)
    return _hubs[loop]
