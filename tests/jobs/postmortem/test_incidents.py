"""Incidents: opened with a bad end, diagnosed from what the attempt left, by one worker, and again when more is known."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from jobs.following import ending
from jobs.following.cause import Ended
from jobs.models import Attempt, Diagnosis, Incident
from jobs.postmortem import incidents
from nodes.models import Agent, Gpu, Holding, NodeEvent
from tests.jobs.following.running import running_attempt

pytestmark = pytest.mark.django_db
RAISED = """Traceback (most recent call last):
  File "/home/mira/train.py", line 40, in main
    batch = data["label"]
KeyError: 'label'
"""
