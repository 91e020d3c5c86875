"""Store the few columns of each job that lists filter and sort by, maintained by the database like an index."""

from __future__ import annotations

from django.db import models


class Listing(models.Model):
    """A job's row of the listing. Only triggers write it (jobs.listing.triggers): code reads it, never changes it.

    Filters and orders come from three tables: the job's, its latest attempt's and the project's. No index spans tables,
    so without this one every list would scan every job there ever was (docs/decisions/0018).
    """

    id = models.BigAutoField(primary_key=True, help_text="The job's id.")
    attempt_id = models.BigIntegerField(
        null=True, help_text="Id of its latest attempt, which determines state and times."
    )
    project_id = models.BigIntegerField()
    owner_id = models.BigIntegerField()
    kind = models.CharField(max_length=16)
    name = models.CharField(max_length=128)
    state = models.CharField(max_length=16, blank=True, help_text="Empty: it has no attempt yet.")
    created_at = models.DateTimeField()
    started_at = models.DateTimeField(help_text="1970 if it has not started, so that sorting needs no nulls.")
    ended_at = models.DateTimeField(help_text="1970 if it has not ended.")

    class Meta:
        # Each begins with the columns compared for equality and ends in an order by id: a page is one range of it.
        indexes = (
            models.Index(fields=["state", "id"], name="listing_state"),
            models.Index(fields=["name", "id"], name="listing_name"),
            models.Index(fields=["started_at", "id"], name="listing_started"),
            models.Index(fields=["ended_at", "id"], name="listing_ended"),
            models.Index(fields=["created_at", "id"], name="listing_created"),
            models.Index(fields=["kind", "id"], name="listing_kind"),
            models.Index(fields=["owner_id", "id"], name="listing_owner"),
            models.Index(fields=["project_id", "id"], name="listing_of_project"),
            models.Index(fields=["project_id", "state", "id"], name="listing_of_project_state"),
            models.Index(fields=["project_id", "name", "id"], name="listing_of_project_name"),
            models.Index(fields=["project_id", "started_at", "id"], name="listing_of_project_started"),
            models.Index(fields=["project_id", "ended_at", "id"], name="listing_of_project_ended"),
        )

    def __str__(self) -> str:
        return f"#{self.pk} {self.name}"
