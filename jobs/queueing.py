"""Asking a worker to hurry. It is only ever a hint: what is due stands in the database, and the next tick finds it."""

from __future__ import annotations

import logging
import time
from typing import Any

from celery import Task
from kombu.exceptions import OperationalError

logger = logging.getLogger(__name__)

RETRY_S = 2.0
"""A broker that failed is left alone for this long: while Redis hangs, one request waits for it and not every one."""
_retry_at = 0.0


def queue(task: Task, *args: object, **options: Any) -> None:
    """Have the task done soon. No broker: the next tick does it anyway, so nobody waits or fails for that."""
    global _retry_at
    if time.monotonic() < _retry_at:
        return
    try:
        task.apply_async(args, retry=False, ignore_result=True, **options)
    except (OperationalError, OSError) as error:
        _retry_at = time.monotonic() + RETRY_S
        logger.warning("Not queued, the next tick finds it: %s%s (%s)", task.name, args, error)
