"""How many examples of hypothesis a property is tried on: a quarter at every landing, all of them in `make test-all`.

They are derived from the test alone, so a landing would try again what the one before it has.
"""

from __future__ import annotations

import os

WHOLE = os.environ.get("WHOLE") == "yes"


def examples(whole: int) -> int:
    return whole if WHOLE else max(whole // 4, 5)
