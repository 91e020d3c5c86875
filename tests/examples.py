"""Set how many hypothesis examples a property is tried on: a quarter at every landing, all of them in `make test-all`.

The examples are derived from the test alone, so every landing would otherwise repeat the previous one's.
"""

from __future__ import annotations

import os

WHOLE = os.environ.get("WHOLE") == "yes"


def examples(whole: int) -> int:
    return whole if WHOLE else max(whole // 4, 5)
