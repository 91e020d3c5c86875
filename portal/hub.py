"""Fan out live messages: one Redis subscriber per web process, one bounded queue per listener (protocols.md §3).

A listener that does not keep up loses its queue and is told to read again. It never slows down another. What arrives on
a topic goes through the topic's `Relay` once, whatever the number of listeners.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import redis.asyncio
from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

QUEUE = 256  # messages that may wait for one listener
TICK_S = 1.0
_ACK_S = 2.0
_CONTROL = "vigil:hub"  # always subscribed, so that there is something to read
_BACKOFF_S = (0.1, 0.25, 0.5, 1.0, 2.0)

Send = Callable[[bytes | None], Coroutine[Any, Any, None]]
Write = Callable[[bytes], bool]
Item = tuple[str, bytes]  # (audience, message): "" is everyone on the topic


class Relay(Protocol):
    """Converts what is published on one topic into its listeners' messages."""

    async def open(self) -> None:
        """Prepare the relay; called once, after subscribing and before the first listener has joined."""

    def feed(self, message: bytes, audiences: set[str]) -> Iterable[Item]: ...

    def tick(self) -> Iterable[Item]:
        """Return messages that are due; called every second."""
        ...


class PassThrough:
    """A relay that passes messages on unchanged."""

    async def open(self) -> None: ...

    def feed(self, message: bytes, audiences: set[str]) -> Iterable[Item]:
        return (("", message),)

    def tick(self) -> Iterable[Item]:
        return ()


class Listener:
    """A socket's end. A message is sent at once if that needs no waiting; otherwise it joins a bounded queue.

    Waking a task for each message would cost a third of a delivery.
    """

    def __init__(self, topic: str, audience: str, send: Send, write: Write | None) -> None:
        self.topic, self.audience = topic, audience
        self._send, self._write = send, write
        self._queue: deque[bytes | None] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._is_gone = False

    def put(self, message: bytes, packed: bytes) -> None:
        """Deliver a message, given also as a websocket frame."""
        if self._sending is None:
            if self._write is None or not self._write(packed):
                self._begin(message)
        elif len(self._queue) < QUEUE:
            self._queue.append(message)
        else:
            self.miss()

    def miss(self) -> None:
        """Drop the queue, which is useless once a message was lost, and report the loss to the listener."""
        self._queue.clear()
        if self._sending is None:
            self._begin(None)
        else:
            self._queue.append(None)

    def close(self) -> None:
        self._is_gone = True
        if self._sending is not None:
            self._sending.cancel()

    def _begin(self, message: bytes | None) -> None:
        """Run the sending until it has to wait, which is rare; only then create a task for the rest."""
        if self._is_gone:
            return
        sending = self._send(message)
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        except (OSError, RuntimeError):  # the socket is closing
            self._is_gone = True
            return
        # Nothing was awaited since the first step, so the next message finds `_sending`, and queues behind this one.
        self._sending = asyncio.create_task(self._finish(sending, waits_for))

    async def _finish(self, sending: Coroutine[Any, Any, None], waits_for: Any) -> None:
        try:
            await _rest(sending, waits_for)
            while self._queue:
                await self._send(self._queue.popleft())
            self._sending = None
        except (OSError, RuntimeError):
            self._is_gone = True


def frame(message: bytes) -> bytes:
    """Return a complete, binary, unmasked websocket frame (RFC 6455, 5.2): the same bytes for every listener."""
    length = len(message)
    if length < 126:
        head = struct.pack("!BB", 0x82, length)
    elif length < 65_536:
        head = struct.pack("!BBH", 0x82, 126, length)
    else:
        head = struct.pack("!BBQ", 0x82, 127, length)
    return head + message


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Return the rest of a coroutine that has started and waits for something, to be awaited by a task."""
    while True:
        try:
            # Passed to the task unchanged: it may be a future, or the None of sleep(0), which cannot be awaited again.
            # A cancellation (`close`) comes back here as an error, and ends the coroutine where it waits.
            sent = yield waits_for
        except BaseException as error:
            step = partial(coroutine.throw, error)
        else:
            step = partial(coroutine.send, sent)
        try:
            waits_for = step()
        except StopIteration:
            return


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
            packed = frame(message)
            for listener in self.listeners:
                if not audience or listener.audience == audience:
                    listener.put(message, packed)


class Hub:
    """Deliver published messages to listeners. Use it within one event loop.

    It connects with the first listener, and reconnects whenever Redis comes back.
    """

    def __init__(self, url: str, relay: Callable[[str], Relay] = lambda topic: PassThrough()) -> None:
        self._url, self._relay = url, relay
        self._topics: dict[str, _Topic] = {}
        self._pubsub: redis.asyncio.client.PubSub | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._subscribing = asyncio.Lock()  # so that Redis sees joins and leaves of a topic in order

    async def join(self, topic: str, send: Send, *, audience: str = "", write: Write | None = None) -> Listener:
        """Return a listener that misses nothing published from now on; without Redis it is notified when Redis is back.

        `send` gets message after message, one at a time, and None if some were lost. `write`, if given, puts a finished
        frame on the wire at once, or returns False: then `send` is used.
        """
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._tick())]
        entry = self._topics.get(topic)
        listener = Listener(topic, audience, send, write)
        if entry is None:
            entry = self._topics[topic] = _Topic(self._relay(topic))
        # Added before the subscription: if others join and leave meanwhile, none of them is the last and unsubscribes.
        entry.listeners.add(listener)
        entry.audiences.add(audience)
        try:
            if not entry.subscribed.is_set():  # perhaps by a caller that was cancelled before subscribing
                await self._subscribe(topic)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(entry.subscribed.wait(), _ACK_S)
            async with entry.opened:
                if not entry.is_open:
                    await entry.relay.open()
                    entry.is_open = True
        except BaseException:  # the caller never gets this listener, so nobody else can remove it
            await self.leave(listener)
            raise
        return listener

    async def leave(self, listener: Listener) -> None:
        listener.close()
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
        """Read for as long as the process lives, reconnecting as often as needed."""
        failures = 0
        while True:
            client = redis.asyncio.Redis.from_url(self._url, socket_connect_timeout=2.0, health_check_interval=15)
            pubsub = client.pubsub()
            try:
                topics = set(self._topics)
                await pubsub.subscribe(_CONTROL, *topics)
                self._pubsub = pubsub
                # Listeners that joined during the connection attempt had no connection to subscribe on.
                await self._subscribe(*(self._topics.keys() - topics))
                if failures:
                    logger.info("Live updates continue: Redis is back")
                    # Only now: a listener that had read earlier would miss what was published in between.
                    self._miss_all()
                failures = 0
                while True:
                    self._take(await pubsub.get_message(timeout=5.0))
            except Exception as error:  # any error: without this loop no listener would receive anything
                is_connection_error = isinstance(error, RedisError | OSError)
                if not is_connection_error:
                    logger.exception("Live updates pause")
                elif not failures:
                    logger.warning("Live updates pause: Redis does not answer (%s)", error)
                self._pubsub = None
                for entry in self._topics.values():
                    entry.subscribed.clear()
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
            finally:
                self._pubsub = None
                with contextlib.suppress(Exception):
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
        """Notify every listener that it may have missed messages while the connection was down."""
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


def hub_of_process(url: str, relay: Callable[[str], Relay]) -> Hub:
    """Return the one hub of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _hubs:
        _hubs[loop] = Hub(url, relay)
    return _hubs[loop]
