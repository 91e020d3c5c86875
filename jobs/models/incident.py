"""An incident: one thing that went wrong in an attempt, and every version of the verdict on it."""

from __future__ import annotations

from typing import Self

from django.conf import settings
from django.db import models
from django.db.models import Case, F, Q, When
from django.utils import timezone

from jobs.models.attempt import Attempt
from portal.models import Project, User


class IncidentQuerySet(models.QuerySet["Incident"]):
    def visible_to(self, user: User) -> Self:
        """Return incidents of jobs that a person sees: of their projects, or all for sysadmins."""
        return self if user.is_sysadmin else self.filter(project__in=user.memberships.values("project"))

    def due(self) -> Self:
        """Return incidents to diagnose: first those whose verdict is awaited, then the longest due."""
        is_first = Q(incarnation=None, version=0)
        return self.filter(due_at__lte=timezone.now()).order_by(Case(When(is_first, then=0), default=1), "due_at")

    def judged(self) -> Self:
        """Return incidents whose cause a person has set, the newest first, whether it is the machine's or another."""
        return self.exclude(overruled_cause="").order_by("-pk")

    def with_job(self) -> Self:
        return self.select_related("attempt__job").defer(
            "attempt__job__spec", "attempt__job__spec_toml", "attempt__job__notes", "attempt__slurm_steps"
        )

    def with_people(self) -> Self:
        """Join what a list shows of people: project, owner, and who has overruled or published it."""
        people = ("project", "attempt__job__owner", "overruled_by", "published_by")
        return self.with_job().select_related(*people)


class Incident(models.Model):
    """The bad end of an attempt, or of an incarnation that was restarted in place.

    The newest version of the verdict (`Diagnosis`) is copied here for lists and counts. A person's cause takes
    precedence: `cause` is then theirs, and the machine's is in its newest version.
    """

    attempt = models.ForeignKey(Attempt, models.CASCADE, related_name="incidents")
    project = models.ForeignKey(
        Project, models.CASCADE, related_name="+", db_index=False, help_text="The job's project, for lists."
    )
    incarnation = models.PositiveIntegerField(
        null=True, blank=True, help_text="Incarnation that failed; null: the whole attempt ended."
    )
    at = models.DateTimeField(help_text="When it was detected: the end of the attempt or incarnation.")
    opened_at = models.DateTimeField(default=timezone.now)
    due_at = models.DateTimeField(null=True, blank=True, help_text="When to diagnose it next; null: not scheduled.")
    tries = models.PositiveSmallIntegerField(
        default=0, help_text="Attempts to diagnose it since the newest verdict, including a running one."
    )
    version = models.PositiveIntegerField(default=0, help_text="Version of the newest verdict; 0: none yet.")
    is_final = models.BooleanField(default=False, help_text="No more evidence can arrive.")

    cause = models.CharField(max_length=32, blank=True)
    confirmed_cause = models.CharField(
        max_length=32,
        blank=True,
        help_text="Cause that sysadmins must act on according to machine or scheduler, even if overruled.",
    )
    confidence = models.FloatField(null=True, blank=True)
    says = models.CharField(max_length=300, blank=True)
    entry = models.CharField(max_length=64, blank=True, help_text="Catalogue entry that matched the root cause.")
    rank = models.IntegerField(null=True, blank=True)
    node = models.CharField(max_length=255, blank=True)
    fingerprint = models.CharField(max_length=32, blank=True, help_text="Equal for failures of the same program.")

    overruled_cause = models.CharField(max_length=32, blank=True)
    overruled_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+")
    overruled_at = models.DateTimeField(null=True, blank=True)
    overruled_why = models.TextField(blank=True)
    is_counted = models.BooleanField(default=False, help_text="Its row of jobs.models.Failure is up to date.")

    published_at = models.DateTimeField(null=True, blank=True, help_text="Null: a draft.")
    published_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+")

    objects = IncidentQuerySet.as_manager()

    class Meta:
        ordering = ("-at", "-id")
        constraints = (
            models.UniqueConstraint(
                fields=["attempt"], condition=Q(incarnation=None), name="one_incident_an_end_of_attempt"
            ),
            models.UniqueConstraint(fields=["attempt", "incarnation"], name="one_incident_an_incarnation"),
        )
        indexes = (
            # SQLite uses a partial index only if the query has the same condition, constants included.
            models.Index(fields=["due_at"], condition=Q(due_at__isnull=False), name="incidents_due"),
            # Each alone answers which incidents a page of the list has (jobs.listing.incidents).
            models.Index(fields=["-at", "-id", "cause", "project"], name="incidents_by_time"),
            models.Index(fields=["project", "-at", "-id", "cause"], name="incidents_by_project"),
            models.Index(fields=["cause", "-at", "-id", "project"], name="incidents_by_cause"),
            models.Index(fields=["-at", "-id"], condition=Q(published_at__isnull=False), name="incidents_published"),
            models.Index(fields=["fingerprint", "-at", "-id", "project"], name="incidents_by_fingerprint"),
            models.Index(fields=["node", "-at", "-id", "project", "cause"], name="incidents_by_node"),
            models.Index(fields=["-id"], condition=~Q(overruled_cause=""), name="incidents_judged"),
            models.Index(fields=["id"], condition=Q(is_counted=False), name="incidents_to_count"),
        )

    def __str__(self) -> str:
        return f"{self.attempt} {self.cause or 'not diagnosed'}"

    @property
    def is_confirmed(self) -> bool:
        """Return whether the machine or the scheduler supports the cause, where a sysadmin must act on it."""
        return bool(self.cause) and self.confirmed_cause == self.cause

    @property
    def is_overruled(self) -> bool:
        return self.overruled_at is not None

    @property
    def ended_its_attempt(self) -> bool:
        """Return whether it ended its attempt and has a post-mortem; else the ranks were restarted in place."""
        return self.incarnation is None


class Diagnosis(models.Model):
    """A version of the verdict on an incident; all versions are stored."""

    incident = models.ForeignKey(Incident, models.CASCADE, related_name="diagnoses")
    version = models.PositiveIntegerField()
    made_at = models.DateTimeField(default=timezone.now)
    seconds = models.FloatField(default=0.0, help_text="How long the diagnosis took.")
    cause = models.CharField(max_length=32)
    confidence = models.FloatField()
    verdict = models.JSONField(help_text="As `vigil diagnose --json` prints it.")

    class Meta:
        ordering = (F("version").desc(),)
        constraints = (models.UniqueConstraint(fields=["incident", "version"], name="one_diagnosis_a_version"),)

    def __str__(self) -> str:
        return f"{self.incident_id}.{self.version} {self.cause}"
