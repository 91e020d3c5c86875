"""Create attempts that fail, with the logs that they leave."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from django.utils import timezone

from jobs.following import ending
from jobs.following.end_causes.cause import AttemptEnd
from jobs.models import Attempt, Incident, Job
from jobs.postmortem import incidents
from portal.models import User
from tests.lab import a_job, a_project

RAISED = """step 1 loss 2.0
Traceback (most recent call last):
  File "/home/mira/train.py", line 40, in main
    batch = data["label"]
KeyError: 'label'
"""
GONE = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:9885\n"
FAILED = {"cause": "failed", "first_failure": {"rank": 1, "kind": "exception", "exit_code": 1, "error": "KeyError"}}


def running(owner: User, runs: Path, *, project: str = "default", **fields: Any) -> Attempt:
    """Return an attempt on two nodes that has run for ten minutes, with its folder on disk."""
    job = a_job(owner, a_project(project), state="running")
    directory = f"{project}/{job.pk}-abcdef"
    Job.objects.filter(pk=job.pk).update(directory=directory)
    for folder in ("job/attempt-1/logs", "portal"):
        (runs / directory / folder).mkdir(parents=True)
    given = {"scheduler_id": str(job.pk), "nodes": ["dgx-01", "dgx-02"], "directory": "attempt-1", "step": 120}
    began = timezone.now() - timedelta(minutes=10)
    Attempt.objects.filter(job=job).update(**{**given, "started_at": began, "created_at": began, **fields})
    return Attempt.objects.select_related("job__project", "job__owner").get(job=job)


def write(attempt: Attempt, runs: Path, name: str, text: str) -> None:
    (runs / attempt.job.directory / "job/attempt-1/logs" / name).write_text(text)


def dead(owner: User, runs: Path, text: str = RAISED, **options: Any) -> Incident:
    """Return the incident of a failed attempt, diagnosed by the last output of its second rank."""
    attempt = running(owner, runs, **options)
    write(attempt, runs, "0.0.log", GONE)
    write(attempt, runs, "0.1.log", text)
    assert ending.end(attempt, AttemptEnd("failed", 1, result=FAILED))
    incident = Incident.objects.get(attempt=attempt)
    assert incidents.diagnose(incident.pk)
    incident.refresh_from_db()
    return incident
