"""The next steps' batches, looked up by a thread while this step computes.

What is ready but not taken counts for nothing: a position is only ever what the trainer has consumed, so a resume, on
any number of ranks, asks for exactly what was not trained on. Cheap data is looked up where it is needed: handing over
between threads costs as much as looking up a few dozen cached rows. The thread starts once look-ups keep taking longer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

DEPTH = 4
"""Steps that are ready at most, the one being looked up included."""
CHEAP_SECONDS = 0.0005
SLOW_TO_START = 3.0
FORGOTTEN = 0.05
"""A look-up that was slow by chance, the machine being busy, weighs less with every one that is not."""
LEAVE_SECONDS = 5.0
"""A thread that is stuck in a read that never ends is left behind: it holds nothing that anybody needs."""


class Prefetch(Generic[T]):
    """`make(position)` for position after position, `stride` apart, ahead of time; nothing at `end` or beyond."""

    def __init__(self, make: Callable[[int], T], *, stride: int, end: int, cheap: float = CHEAP_SECONDS) -> None:
        self._make, self._stride, self._end, self._cheap = make, stride, end, cheap
        self._change = threading.Condition()
        self._ready: deque[tuple[int, T | BaseException]] = deque()
        self._next = self._wanted = -1
        self._slow: float | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def runs_ahead(self) -> bool:
        return self._thread is not None

    def take(self, position: int) -> T:
        """What `make` gives for this position, or its exception, in the order in which positions are taken."""
        if self._thread is None:
            return self._make_here(position)
        with self._change:
            self._wanted = position
            if (self._ready[0][0] if self._ready else self._next) != position:
                self._ready.clear()
                self._next = position
            self._change.notify_all()
            self._change.wait_for(lambda: bool(self._ready) and self._ready[0][0] == position)
            _, found = self._ready.popleft()
            self._change.notify_all()
        if isinstance(found, BaseException):
            self.close()
            raise found
        return found

    def close(self) -> None:
        """Ends the thread after the look-up that it is in. Twice is once."""
        with self._change:
            thread, self._thread = self._thread, None
            self._closing = True
            self._ready.clear()
            self._change.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(LEAVE_SECONDS)

    def _make_here(self, position: int) -> T:
        began = time.perf_counter()
        found = self._make(position)
        seconds = time.perf_counter() - began
        if self._slow is None:  # the first is slow whatever the data: files are opened, memory is mapped
            self._slow = 0.0
        elif seconds <= self._cheap:
            self._slow -= self._slow * FORGOTTEN
        else:
            self._slow += 1
            if self._slow >= SLOW_TO_START and not self._closing:
                self._start(position + self._stride)
        return found

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
            found: T | BaseException
            try:
                found = self._make(position)
            except BaseException as error:  # raised where it is taken
                found = error
            with self._change:
                if self._next == position:  # else somebody went elsewhere meanwhile
                    self._ready.append((position, found))
                    self._next = position + self._stride
                    self._change.notify_all()

    def _has_work(self) -> bool:
        """Whether something is to be made: not beyond the end unless it is waited for, nor past a failure."""
        if self._ready and isinstance(self._ready[-1][1], BaseException):
            return False
        return len(self._ready) < DEPTH and (self._next < self._end or self._next == self._wanted)
