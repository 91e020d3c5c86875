"""Present a job as a row of a list: on the jobs page, at home, and in live updates."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from jobs.models import Attempt, Job
from jobs.presenting.job_row import progress_text, speed_text
from jobs.presenting.metric_values import number
from jobs.presenting.size import has_ranks, ranks_and_nodes, size
from jobs.progress import Progress, progress
from jobs.waiting.reasons import waiting_reason_of
from vigil_core import formatting


@dataclass
class JobRow:
    """A job as its row shows it. Its latest attempt, project, owner and tags must be loaded."""

    job: Job
    now: datetime

    @property
    def attempt(self) -> Attempt:
        assert self.job.latest is not None
        return self.job.latest

    @property
    def state(self) -> str:
        return self.attempt.state

    @cached_property
    def progress(self) -> Progress:
        return progress(self.attempt, self.now)

    @property
    def bar(self) -> float:
        if self.state == "completed":
            return 1.0
        return self.progress.fraction or 0.0

    @property
    def counted(self) -> str:
        """Return the text under the progress bar."""
        return progress_text(
            step=self.progress.step,
            steps=self.progress.steps,
            unit=self.job.job_kind.unit,
            state=self.state,
            phase=self.attempt.phase,
            spec=self.job.spec,
        )

    @property
    def done_at(self) -> datetime | None:
        eta = self.progress.eta_seconds
        return self.now + timedelta(seconds=eta) if eta is not None else None

    @property
    def why(self) -> str:
        """Return why the job waits or how it ended, short enough for a table cell."""
        attempt = self.attempt
        if attempt.is_alive and attempt.cancel_asked_at:
            return "killing" if attempt.kill_requested_at else "cancelling"
        if attempt.state == "completed" and attempt.started_at and attempt.ended_at:
            took = formatting.duration((attempt.ended_at - attempt.started_at).total_seconds())
            return f"attempt {attempt.number}: {took}" if attempt.number > 1 else took
        return waiting_reason_of(attempt, self.job.spec, self.now)

    @property
    def ranks(self) -> int | None:
        ranks, _, gpus = ranks_and_nodes(self.job.spec)
        return ranks if gpus or has_ranks(self.job.spec) else None

    @property
    def size(self) -> str:
        return size(self.job.spec)

    @property
    def loss(self) -> float | None:
        return number(self.attempt.latest, "loss")

    @property
    def speed(self) -> str:
        return speed_text(self.attempt.latest)
