"""What the parts of one tick of the follower share: its lease, its scheduler, and what they live through."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

from jobs import live
from jobs.lease import Held, LeaseLost
from jobs.models import Attempt
from nodes.schedulers.base import Scheduler, SchedulerError

logger = logging.getLogger(__name__)


class TickContext:
    """One tick, under its lease. `away`: why the scheduler did not answer in it, so that it is not asked again."""

    def __init__(self, held: Held, scheduler: Scheduler) -> None:
        self.held, self.scheduler = held, scheduler
        self.away: SchedulerError | None = None

    def live_through(self, part: Callable[[], object], name: str) -> None:
        """One thing that fails must not keep the others from being followed; the next tick tries it again."""
        try:
            part()
        except LeaseLost:
            raise
        except SchedulerError as error:
            logger.warning("%s: %s", name, error)
        except Exception:
            logger.exception("%s failed in this tick", name)

    def note(self, attempt: Attempt, **changes: datetime | str | None) -> None:
        """Write down where one that has not ended stands."""
        with self.held.writing():
            Attempt.objects.filter(pk=attempt.pk, ended_at=None).update(**changes)
            live.announce(attempt.pk)
        for name, value in changes.items():
            setattr(attempt, name, value)
