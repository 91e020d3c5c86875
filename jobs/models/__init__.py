"""Import all models of this app: Django looks for them here."""

from jobs.models.attempt import Attempt, Event, Stream
from jobs.models.checkpoint import Checkpoint, EarlyPrune
from jobs.models.disk import DiskSum
from jobs.models.gameday import Drill, GameDay
from jobs.models.incident import Diagnosis, Incident
from jobs.models.job import Job, Predecessor, Tag
from jobs.models.listing import Listing
from jobs.models.postmortem import FollowUp, PostMortem
from jobs.models.reliability import CadenceOrder, Failure, JobTime, NodeHeld, ProjectHeld, ProjectNodeHeld
from jobs.models.round import Client, ClientSplit, PendingRoundEvent, Round
from jobs.models.site_entry import Replay, SiteCatalogue, SiteEntry
from jobs.models.step_time import AttemptPace
from jobs.models.stray import Stray
from jobs.models.sweep import Sweep
from jobs.models.waste import GpuHours, JobHours

__all__ = [
    "Attempt",
    "AttemptPace",
    "CadenceOrder",
    "Checkpoint",
    "Client",
    "ClientSplit",
    "Diagnosis",
    "DiskSum",
    "Drill",
    "EarlyPrune",
    "Event",
    "FollowUp",
    "Failure",
    "GameDay",
    "GpuHours",
    "Incident",
    "Job",
    "JobHours",
    "JobTime",
    "Listing",
    "PendingRoundEvent",
    "PostMortem",
    "Predecessor",
    "Replay",
    "Round",
    "SiteCatalogue",
    "SiteEntry",
    "NodeHeld",
    "ProjectHeld",
    "ProjectNodeHeld",
    "Stray",
    "Stream",
    "Sweep",
    "Tag",
]
