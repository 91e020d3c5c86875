"""Test prefetched batches: the same as without, in the same order, and not counted as consumed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.waiting import until
from training.loader import prefetch
from training.loader.prefetch import Prefetch

STRIDE = 10


_opened: list[Prefetch[int]] = []


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Close what the test opened, also after a failure; no thread may remain."""
    yield
    while _opened:
        _opened.pop().close()
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def _open(make: Callable[[int], int], *, end: int = 10_000, cheap: float) -> Prefetch[int]:
    _opened.append(Prefetch(make, stride=STRIDE, end=end, cheap=cheap))
    return _opened[-1]


def _ahead(make: Callable[[int], int], *, end: int = 10_000) -> Prefetch[int]:
    """Return a prefetcher whose thread runs: every look-up counts as slow."""
    found = _open(make, end=end, cheap=-1.0)
    for step in range(4):
        assert found.take(step * STRIDE) == make(step * STRIDE)
    assert found.runs_ahead
    return found


def test_cheap_data_needs_no_thread() -> None:
    found = _open(lambda position: position, cheap=1.0)
    assert [found.take(step * STRIDE) for step in range(1000)] == list(range(0, 10_000, STRIDE))
    assert not found.runs_ahead


def test_a_single_slow_batch_starts_no_prefetching() -> None:
    slow = {50, 900}

    def make(position: int) -> int:
        if position // STRIDE in slow:
            time.sleep(0.02)
        return position

    found = _open(make, cheap=0.01)
    for step in range(1000):
        found.take(step * STRIDE)
    assert not found.runs_ahead


def test_it_runs_ahead_so_far_and_no_further() -> None:
    created: list[int] = []

    def make(position: int) -> int:
        created.append(position)
        return position

    found = _ahead(make)
    furthest = (3 + prefetch.DEPTH) * STRIDE
    until(lambda: furthest in created)
    time.sleep(0.02)
    assert max(created) == furthest
    found.close()
    assert found.take(40) == 40, "closed, it still returns what is requested"


def test_nothing_is_prefetched_beyond_the_end_unless_requested() -> None:
    created: list[int] = []

    def make(position: int) -> int:
        created.append(position)
        return position

    found = _ahead(make, end=60)
    assert [found.take(position) for position in (40, 50)] == [40, 50]
    time.sleep(0.02)
    assert max(created) == 50
    assert found.take(60) == 60


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.integers(0, 12), max_size=40))
def test_it_returns_what_is_requested_at_any_position(steps: list[int]) -> None:
    found = _ahead(lambda position: position * 7, end=100)
    assert [found.take(step * STRIDE) for step in steps] == [step * STRIDE * 7 for step in steps]
    _opened.pop().close()


def test_what_goes_wrong_in_the_thread_is_raised_where_it_is_taken() -> None:
    def make(position: int) -> int:
        if position == 70:
            raise OSError(5, "Input/output error")
        return position

    found = _ahead(make)
    assert [found.take(position) for position in (40, 50, 60)] == [40, 50, 60]
    with pytest.raises(OSError, match="Input/output error") as caught:
        found.take(70)
    assert any(entry.name == "make" for entry in caught.traceback)
    assert not found.runs_ahead
    with pytest.raises(OSError, match="Input/output error"):
        found.take(70)
    assert found.take(80) == 80


def test_going_elsewhere_after_a_failure() -> None:
    def make(position: int) -> int:
        if position == 50:
            raise ValueError("damaged")
        return position

    found = _ahead(make)
    assert found.take(40) == 40
    assert [found.take(position) for position in (200, 210)] == [200, 210]


def test_only_creating_a_batch_is_waited_for() -> None:
    """While a step takes longer than a look-up, every batch is there before it is taken."""
    threads: dict[int, str] = {}

    def make(position: int) -> int:
        threads[position] = threading.current_thread().name
        return position

    found = _ahead(make)
    for position in range(4 * STRIDE, 24 * STRIDE, STRIDE):
        until(lambda position=position: position in threads, f"the look-up at {position}")
        assert found.take(position) == position
    assert {threads[position] for position in range(4 * STRIDE, 24 * STRIDE, STRIDE)} == {"prefetch"}


def test_it_ends_in_the_middle_of_a_batch() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def make(position: int) -> int:
        if position == 40:
            inside.set()
            go_on.wait(10)
        return position

    found = _open(make, cheap=-1.0)
    for step in range(4):
        found.take(step * STRIDE)
    inside.wait(10)
    threading.Timer(0.05, go_on.set).start()
    found.close()
    found.close()
