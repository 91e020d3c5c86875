"""Store a job: what a person requested."""

from __future__ import annotations

from typing import Self

from django.conf import settings
from django.db import models
from django.utils.functional import cached_property

from jobs.models.sweep import Sweep
from portal.models import Project, User
from vigil_core import kinds


class JobQuerySet(models.QuerySet["Job"]):
    def visible_to(self, user: User) -> Self:
        # Not a join: a list then walks jobs in its order and stops when its page is full, instead of sorting them all.
        return self if user.is_sysadmin else self.filter(project__in=user.memberships.values("project"))

    def with_latest_attempt(self) -> Self:
        return self.select_related("latest", "project", "owner").defer("latest__slurm_steps")


class Job(models.Model):
    """A person's request, as a validated spec. Its state is its latest attempt's, never a second copy."""

    project = models.ForeignKey(Project, models.PROTECT, related_name="jobs")
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="jobs")
    name = models.CharField(max_length=128)
    kind = models.CharField(max_length=16)
    spec = models.JSONField(help_text="The complete validated specification with defaults (jobs.spec.JobSpec).")
    spec_toml = models.TextField(help_text="The specification as written by its author.")
    notes = models.TextField(blank=True)
    parent = models.ForeignKey("self", models.SET_NULL, null=True, blank=True, related_name="clones")
    sweep = models.ForeignKey(Sweep, models.SET_NULL, null=True, blank=True, related_name="jobs")
    sweep_index = models.PositiveIntegerField(
        null=True, blank=True, help_text="Index in the sweep, from 0; also its task number in the array."
    )
    sweep_values = models.JSONField(null=True, blank=True, help_text="Its values of the varied fields, by path.")
    latest = models.OneToOneField("Attempt", models.SET_NULL, null=True, blank=True, related_name="+")
    directory = models.CharField(max_length=300, blank=True, help_text="Run directory, relative to VIGIL_RUNS.")
    created_at = models.DateTimeField(auto_now_add=True, db_index=True)
    disk_bytes = models.BigIntegerField(default=0, help_text="Size of its run directory when it was last measured.")
    disk_measured_at = models.DateTimeField(null=True, blank=True, db_index=True, help_text="Null: not measured yet.")
    disk_is_partial = models.BooleanField(
        default=False, help_text="The run directory was too large to measure completely."
    )

    ATTACHED = "attached"  # the kind of jobs that somebody submitted to Slurm outside Vigil, which only follows them

    objects = JobQuerySet.as_manager()

    class Meta:
        ordering = ("-id",)
        indexes = (
            models.Index(fields=["project", "-id"], name="jobs_of_project"),
            models.Index(fields=["-disk_bytes", "-id"], name="jobs_by_disk"),
            models.Index(
                fields=["project", "disk_bytes", "disk_measured_at", "disk_is_partial", "created_at"],
                name="jobs_disk_use",
            ),
        )

    def __str__(self) -> str:
        return f"#{self.pk} {self.name}"

    @cached_property
    def tag_names(self) -> list[str]:
        """Return its tags; lists set them for all their jobs at once (jobs.listing.jobs)."""
        return sorted(self.tags.values_list("name", flat=True))

    @property
    def is_attached(self) -> bool:
        return self.kind == self.ATTACHED

    @property
    def job_kind(self) -> kinds.JobKind:
        return kinds.by_name(self.kind)


class Tag(models.Model):
    job = models.ForeignKey(Job, models.CASCADE, related_name="tags")
    name = models.CharField(max_length=64, db_index=True)

    class Meta:
        constraints = (models.UniqueConstraint(fields=["job", "name"], name="a_tag_once_a_job"),)

    def __str__(self) -> str:
        return self.name


class Predecessor(models.Model):
    """A job waits for another one to complete. `number` outlives that one; `met`: it has completed once."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="predecessors")
    before = models.ForeignKey(Job, models.SET_NULL, null=True, related_name="followers")
    number = models.BigIntegerField()
    met = models.BooleanField(default=False)

    class Meta:
        constraints = (models.UniqueConstraint(fields=["job", "number"], name="waits_once_for_a_job"),)
        indexes = (models.Index(fields=["job"], condition=models.Q(met=False), name="unmet_predecessors"),)

    def __str__(self) -> str:
        return f"{self.job} after #{self.number}"
