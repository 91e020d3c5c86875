"""Test that a history written in bulk equals what the portal itself would have written: rows, listing, schema."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client

from bench import history
from jobs.listing import triggers
from jobs.models import Attempt, Job, Listing
from jobs.models.job import Tag

pytestmark = pytest.mark.django_db
_SCHEMA = {
    "sqlite": "SELECT type, name, sql FROM sqlite_master",
    "postgresql": """
        SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'
        UNION ALL SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
        UNION ALL SELECT tgrelid::regclass::text, tgname, '' FROM pg_trigger WHERE NOT tgisinternal""",
}


def schema() -> list[tuple[str, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(_SCHEMA[connection.vendor])
        return sorted(row for row in cursor.fetchall() if not row[1].startswith("jobs_listing_names"))


def lines() -> list[dict[str, Any]]:
    return list(Listing.objects.order_by("pk").values())


def test_bulk_leaves_the_lines_that_row_by_row_would(db: None) -> None:
    before = schema()
    lab, _ = history.make(400)
    assert schema() == before, "every index, reference and trigger is back"
    assert triggers.has_triggers(connection)
    created = lines()
    assert len(created) == Job.objects.count() == 400
    assert Attempt.objects.filter(job__latest=None).count() == 0
    _rewrite()
    assert lines() == created, "as the triggers write them"
    client = Client(headers={"host": "127.0.0.1"})
    client.force_login(lab.sysadmin, backend="allauth.account.auth_backends.AuthenticationBackend")
    name = Job.objects.order_by("pk")[7].name
    assert client.get("/api/v1/jobs", {"q": name}).json()["items"][0]["name"] == name


def _rewrite() -> None:
    """Write the jobs in the order of a portal: first the job, then its attempts, then which is its latest."""
    jobs, attempts, tags = (
        list(Job.objects.order_by("pk")),
        list(Attempt.objects.order_by("pk")),
        list(Tag.objects.all()),
    )
    created = {job.pk: job.created_at for job in jobs}
    latest = {job.pk: job.latest_id for job in jobs}
    Job.objects.all().delete()
    assert lines() == []
    for job in jobs:
        job.latest_id = None
        job.save(force_insert=True)
        Job.objects.filter(pk=job.pk).update(created_at=created[job.pk])  # which a save sets to now
    for attempt in attempts:
        attempt.save(force_insert=True)
    for number, attempt_id in latest.items():
        Job.objects.filter(pk=number).update(latest=attempt_id)
    Tag.objects.bulk_create(tags)
