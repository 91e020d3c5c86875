"""A sweep of six jobs, followed tick by tick."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.utils import timezone

from jobs.following import follow
from jobs.models import Attempt, Stray, Sweep
from jobs.spec import SweepSpec
from jobs.submitting import sweeps
from portal.models import User
from tests.jobs.schedulers import ScriptedScheduler

TEXT = """\
# Which rate?
name = "rates"
project = "default"

[run]
steps = 40  # short

[sweep]
at_once = 2

[sweep.over]
"run.learning_rate" = [1e-3, 2e-3]
"run.seed" = [1, 2, 3]
"""


def make(user: User, text: str = TEXT, **options: Any) -> Sweep:
    return sweeps.submit(user, SweepSpec.parse_toml(text), spec_toml=text, **options)[0]


def tick(scheduler: ScriptedScheduler) -> None:
    assert follow.tick(scheduler)


def later() -> None:
    """Move the clock further than any request takes."""
    moment = timezone.now() - timedelta(seconds=31)
    Attempt.objects.filter(ended_at=None, scheduler_id="").exclude(submitting_at=None).update(submitting_at=moment)
    Stray.objects.update(tried_at=moment)


def firsts(sweep: Sweep) -> list[Attempt]:
    rows = Attempt.objects.filter(job__sweep=sweep, number=1).select_related("job")
    return list(rows.order_by("job__sweep_index"))
