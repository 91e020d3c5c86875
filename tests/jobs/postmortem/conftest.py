"""Provide an attempt on two nodes whose second rank was killed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from jobs.models import Job
from tests.jobs.postmortem.attempt_files import ALONE, GONE, Left
from tests.jobs.reporting import attempt_of, job_of


@pytest.fixture
def left(runs: Path) -> Left:
    job = job_of()
    spec = {**job.spec, "resources": {**job.spec.get("resources", {}), "gpus_per_node": 8}}
    Job.objects.filter(pk=job.pk).update(directory="default/1-abcdef", spec=spec)
    job.refresh_from_db()
    folder = runs / "default/1-abcdef/job/attempt-1"
    (folder / "logs").mkdir(parents=True)
    (runs / "default/1-abcdef/portal").mkdir()
    fields: dict[str, Any] = {"scheduler_id": "7", "nodes": ["dgx-01", "dgx-02"], "directory": "attempt-1"}
    attempt = attempt_of(job, started_at=timezone.now() - timedelta(hours=1), **fields)
    failure = {"rank": 1, "kind": "signal", "exit_code": None, "signal": 9, "error": "step 2 loss 1.9"}
    left = Left(attempt, folder, {"cause": "failed", "first_failure": failure})
    left.write("logs/0.0.log", GONE)
    left.write("logs/0.1.log", ALONE)
    return left
