"""Log warnings about what machines send, once an hour per machine and reason: one may cause thousands a second."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable

WINDOW_S = 3_600.0
_MOST_KEYS = 10_000  # machines of a large site times the reasons

logger = logging.getLogger(__name__)
_last: dict[Hashable, float] = {}


def once(key: Hashable, message: str, *arguments: object) -> None:
    """Log the warning unless one with this key was logged within the last hour by this process."""
    now = time.monotonic()
    if now - _last.get(key, -WINDOW_S) < WINDOW_S:
        return
    if len(_last) >= _MOST_KEYS:
        _last.clear()
    _last[key] = now
    logger.warning(message, *arguments)
