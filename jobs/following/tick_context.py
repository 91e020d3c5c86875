"""Share between the parts of one tick of the follower: its lease, its scheduler, and the isolation of failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime

from jobs import live
from jobs.lease import ActiveLease, LeaseLost
from jobs.models import Attempt
from nodes.schedulers.base import JobStatus, Scheduler, SchedulerError

logger = logging.getLogger(__name__)


class TickContext:
    """The state of a tick under its lease.

    `outage`: why the scheduler did not answer in this tick, so that it gets no more calls. `statuses`: of the jobs that
    were polled, by id.
    """

    def __init__(self, lease: ActiveLease, scheduler: Scheduler) -> None:
        self.lease, self.scheduler = lease, scheduler
        self.outage: SchedulerError | None = None
        self.statuses: Mapping[str, JobStatus] = {}

    def run_isolated(self, part: Callable[[], object], name: str) -> None:
        """Run one part so that its failure does not stop the others; the next tick tries it again."""
        try:
            part()
        except LeaseLost:
            raise
        except SchedulerError as error:
            logger.warning("%s: %s", name, error)
        except Exception:
            logger.exception("%s failed in this tick", name)

    def note(self, attempt: Attempt, **changes: datetime | str | None) -> None:
        """Store progress of an attempt that has not ended."""
        with self.lease.writing():
            Attempt.objects.filter(pk=attempt.pk, ended_at=None).update(**changes)
            live.announce(attempt.pk)
        for name, value in changes.items():
            setattr(attempt, name, value)
