"""Run a part of the tests at each landing: the next landing runs the next part, `make test-all` runs them all.

python -m tests.landing.parts 2     which of two parts this commit runs: 0, or 1 after the next commit

TEST_PART (1/4) selects so large a part of all tests. TEST_TURN (a number) selects a part of each group of tests that
the marker `sampled` divides: `@pytest.mark.sampled(3)` divides the cases of a test into three parts, or all tests of a
file that has the mark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def turn(of: int) -> int:
    """Return which of `of` parts this commit runs: by the number of commits, by days in a shallow clone."""
    is_shallow = _git("rev-parse", "--is-shallow-repository") != "false"
    if is_shallow:
        return int(_git("log", "-1", "--format=%ct") or 0) // 86_400 % of
    return int(_git("rev-list", "--count", "HEAD")) % of


def is_in_part(nodeid: str, part: str) -> bool:
    """Return whether a test belongs to a part, "0/2" or "1/2" of two; every test belongs to the part ""."""
    number, _, parts = part.partition("/")
    return not parts or zlib.crc32(nodeid.encode()) % int(parts) == int(number)


def deferred(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests of divided groups that another landing runs, by TEST_TURN."""
    number, position = os.environ.get("TEST_TURN", ""), Counter[str]()
    found = set()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if not number or mark is None:
            continue
        (of,) = mark.args
        group = item.nodeid.partition("[")[0] if mark in item.own_markers else str(item.path)
        if position[group] % of != int(number) % of:
            found.add(item)
        position[group] += 1
    return found


def _git(*words: str) -> str:
    """Return what git prints, nothing where there is no repository."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    print(turn(int(sys.argv[1])))
