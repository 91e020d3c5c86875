"""The records of jobs, read-only: people act on jobs on their pages, where the rules are."""

from django.contrib import admin

from jobs.models import Attempt, Checkpoint, Job
from portal.admin import ReadOnly, site


@admin.register(Job, site=site)
class JobAdmin(ReadOnly):
    list_display = ("id", "name", "kind", "project", "owner", "created_at")
    list_filter = ("kind", "project")
    list_select_related = ("project", "owner")
    search_fields = ("name", "owner__username")


@admin.register(Attempt, site=site)
class AttemptAdmin(ReadOnly):
    list_display = ("id", "job", "number", "state", "scheduler_id", "created_at", "ended_at")
    list_filter = ("state",)
    list_select_related = ("job",)
    search_fields = ("scheduler_id", "job__name", "key")
    exclude = ("token_digest",)


@admin.register(Checkpoint, site=site)
class CheckpointAdmin(ReadOnly):
    list_display = ("id", "job", "step", "name", "state", "bytes", "created_at")
    list_filter = ("state",)
    list_select_related = ("job",)
    search_fields = ("job__name", "name")
