"""Look up the next steps' batches in a thread while the current step computes.

Batches that are ready but not taken do not count: a position is always what the trainer has consumed, so a resume, on
any number of ranks, requests exactly what was not trained on. Cheap data is looked up where it is needed: passing it
between threads costs as much as looking up a few dozen cached rows. The thread starts once look-ups are repeatedly
slow.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

DEPTH = 4
"""Maximum number of steps that are ready, including the one being looked up."""
CHEAP_SECONDS = 0.0005
SLOW_TO_START = 3.0
DECAY = 0.05
"""Each fast look-up reduces the weight of earlier ones that were slow by chance, on a busy machine."""
LEAVE_SECONDS = 5.0
"""A thread that is blocked in an endless read is abandoned after this time: nothing depends on it."""


class Prefetch(Generic[T]):
    """Calls `make(position)` ahead of time, for positions `stride` apart, up to `end`."""

    def __init__(self, make: Callable[[int], T], *, stride: int, end: int, cheap: float = CHEAP_SECONDS) -> None:
        self._make, self._stride, self._end, self._cheap = make, stride, end, cheap
        self._change = threading.Condition()
        self._ready: deque[tuple[int, T | BaseException]] = deque()
        self._next = self._requested = -1
        self._slow: float | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def runs_ahead(self) -> bool:
        return self._thread is not None

    def take(self, position: int) -> T:
        """Return what `make` returns for this position, or raise its exception.

        Positions are taken in order.
        """
        if self._thread is None:
            return self._make_here(position)
        with self._change:
            self._requested = position
            if (self._ready[0][0] if self._ready else self._next) != position:
                self._ready.clear()
                self._next = position
            self._change.notify_all()
            self._change.wait_for(lambda: bool(self._ready) and self._ready[0][0] == position)
            _, result = self._ready.popleft()
            self._change.notify_all()
        if isinstance(result, BaseException):
            self.close()
            raise result
        return result

    def close(self) -> None:
        """End the thread after its current look-up. May be called more than once."""
        with self._change:
            thread, self._thread = self._thread, None
            self._closing = True
            self._ready.clear()
            self._change.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(LEAVE_SECONDS)

    def _make_here(self, position: int) -> T:
        began = time.perf_counter()
        result = self._make(position)
        seconds = time.perf_counter() - began
        if self._slow is None:  # the first is always slow: files are opened, memory is mapped
            self._slow = 0.0
        elif seconds <= self._cheap:
            self._slow -= self._slow * DECAY
        else:
            self._slow += 1
            if self._slow >= SLOW_TO_START and not self._closing:
                self._start(position + self._stride)
        return result

    def _start(self, position: int) -> None:
        self._next = position
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closing or self._has_work())
                if self._closing:
                    return
                position = self._next
            result: T | BaseException
            try:
                result = self._make(position)
            except BaseException as error:  # raised by `take`
                result = error
            with self._change:
                if self._next == position:  # otherwise another position was requested meanwhile
                    self._ready.append((position, result))
                    self._next = position + self._stride
                    self._change.notify_all()

    def _has_work(self) -> bool:
        """Return whether to make the next position.

        Not beyond the end unless it is requested, and not after a failure.
        """
        if self._ready and isinstance(self._ready[-1][1], BaseException):
            return False
        return len(self._ready) < DEPTH and (self._next < self._end or self._next == self._requested)
