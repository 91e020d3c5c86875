"""Whether there is anything to follow: one quick look, so that a portal where nothing runs costs next to nothing."""

from __future__ import annotations

from typing import Any

from django.db import connection
from django.utils import timezone

from jobs.following.steps import LOOK_BACK

# By the partial index of open attempts, the index of ends, and a table that is nearly always empty. Written out: the
# query itself takes a tenth of the time that putting it together would.
_LOOK = """
    SELECT EXISTS (SELECT 1 FROM jobs_attempt WHERE closed_at IS NULL)
        OR EXISTS (SELECT 1 FROM jobs_attempt WHERE ended_at > %s AND slurm_steps_at IS NULL AND scheduler_id <> '')
        OR EXISTS (SELECT 1 FROM jobs_stray)"""
_ORDERS = "SELECT EXISTS (SELECT 1 FROM nodes_nodeorder WHERE state = 'asked')"


def is_idle() -> bool:
    """Nothing waits, runs, or has just ended, and nothing is to be removed from the scheduler."""
    since = connection.ops.adapt_datetimefield_value(timezone.now() - LOOK_BACK)
    return not _is(_LOOK, since)


def has_orders() -> bool:
    """Somebody wants a node drained, or back."""
    return _is(_ORDERS)


def _is(question: str, *params: Any) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(question, params)
        return bool(cursor.fetchone()[0])
