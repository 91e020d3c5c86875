"""Select the tests that a landing runs, by variables that `.ci/run` sets; a plain pytest runs all that it is given.

TEST_PART, TEST_TURN: see `parts`. TEST_AFFECTED: a file that lists the affected test files (see `affected`), with the
quarter of the others to run in TEST_QUARTER.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.landing import affected, parts

MARKERS = (
    "lengthy: takes a second or more; left out of `make test-fast`, run at every landing",
    "exhaustive: proves again, in more layouts or more slowly, what smaller tests prove; run by `make test-all`",
    "sampled(n): a landing runs one n-th of these, the next landing the next",
)


def register(config: pytest.Config) -> None:
    """Describe the markers that only the choice of tests uses."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def is_slow(item: pytest.Item) -> bool:
    """Return whether a test shares costly fixtures with its file: a portal, ranks, a whole Slurm."""
    return item.get_closest_marker("slow") is not None or item.nodeid.startswith("tests/slurm/")


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this landing does not run."""
    part = os.environ.get("TEST_PART", "")
    left_out = parts.deferred(items) | {item for item in items if not parts.is_in_part(item.nodeid, part)}
    if listed := os.environ.get("TEST_AFFECTED"):
        files = {*Path(listed).read_text().splitlines()}
        names = [item.nodeid for item in items if item not in left_out]
        slow = {item.nodeid for item in items if is_slow(item)}
        quarter = os.environ.get("TEST_QUARTER", "")
        run = affected.selected(names, None if "all" in files else files, quarter, slow=slow)
        left_out |= {item for item in items if item.nodeid not in run}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
