"""The models of this app: Django looks for them here."""

from jobs.models.attempt import Attempt, Event, Stream
from jobs.models.checkpoint import Checkpoint
from jobs.models.job import Job, Predecessor, Tag
from jobs.models.stray import Stray
from jobs.models.sweep import Sweep

__all__ = ["Attempt", "Checkpoint", "Event", "Job", "Predecessor", "Stray", "Stream", "Sweep", "Tag"]
