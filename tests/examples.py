"""Set how many hypothesis examples a property is tried on: a quarter at every landing, all of them in `make test-all`.

The examples are derived from the test alone, so every landing would otherwise repeat the previous one's.
"""

from __future__ import annotations

import os

EXHAUSTIVE = os.environ.get("EXHAUSTIVE") == "yes"


def examples(count: int) -> int:
    """Return how many of `count` examples to try in this run."""
    return count if EXHAUSTIVE else max(count // 4, 5)
