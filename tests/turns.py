"""What a landing proves by parts: the next one takes the next part, `make test-all` takes all.

python -m tests.turns 2     whose turn it is of two: 0, or 1 after the next commit

TEST_PART (1/4) takes so much of all tests that there are; TEST_TURN (any number) takes a part of each family that the
marker `turns` divides, as `@pytest.mark.turns(3)` does into three: the cases of a test, or where a file has the mark
all that is in it.
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

ROOT = Path(__file__).resolve().parents[1]


def turn(of: int) -> int:
    """One after the other with the commits; by days where the history was not fetched."""
    is_shallow = _git("rev-parse", "--is-shallow-repository") != "false"
    if is_shallow:
        return int(_git("log", "-1", "--format=%ct") or 0) // 86_400 % of
    return int(_git("rev-list", "--count", "HEAD")) % of


def has_its_turn(test: str) -> bool:
    """Whether the test of this name is of the part that is asked for (TEST_PART: 0/2 or 1/2 where there are two)."""
    mine, _, parts = os.environ.get("TEST_PART", "").partition("/")
    return not parts or zlib.crc32(test.encode()) % int(parts) == int(mine)


def waiting(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Those of a family whose turn is another landing's: one after the other in their order, as TEST_TURN says."""
    asked, place = os.environ.get("TEST_TURN", ""), Counter[str]()
    waits = set()
    for item in items:
        mark = item.get_closest_marker("turns")
        if not asked or mark is None:
            continue
        (of,) = mark.args
        family = item.nodeid.partition("[")[0] if mark in item.own_markers else str(item.path)
        if place[family] % of != int(asked) % of:
            waits.add(item)
        place[family] += 1
    return waits


def _git(*words: str) -> str:
    """What it says; nothing where there is no repository."""
    asked = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip()


if __name__ == "__main__":
    print(turn(int(sys.argv[1])))
