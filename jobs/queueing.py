"""Asking a worker to hurry. It is only ever a hint: what is due stands in the database, and the next tick finds it."""

from __future__ import annotations

import logging
from typing import Any

from celery import Task
from kombu.exceptions import OperationalError

logger = logging.getLogger(__name__)


def queue(task: Task, *args: object, **options: Any) -> None:
    """Have the task done soon. No broker: the next tick does it anyway, so nobody waits or fails for that."""
    try:
        task.apply_async(args, retry=False, ignore_result=True, **options)
    except (OperationalError, OSError) as error:
        logger.warning("Not queued, the next tick finds it: %s%s (%s)", task.name, args, error)
