"""Test the daily clean-up: expired data is deleted, data in use stays."""

from __future__ import annotations

from datetime import timedelta

import pytest
from axes.models import AccessAttempt, AccessLog
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.sessions.models import Session
from django.db.models import Model
from django.utils import timezone

from portal.models import IdempotencyKey, LoginLink
from portal.tasks import SIGN_INS_DAYS, tidy
from tests.lab import person


@pytest.mark.django_db
def test_what_has_run_out_goes_and_the_rest_stays() -> None:
    now = timezone.now()
    long_ago = now - timedelta(days=SIGN_INS_DAYS + 1)
    oskar = person("oskar")
    for name, expires in (("old", now - timedelta(days=2)), ("new", now + timedelta(days=1))):
        LoginLink.objects.create(user=oskar, digest=name, expires_at=expires)
        session = SessionStore()
        session["name"] = name
        session.create()
        Session.objects.filter(pk=session.session_key).update(expire_date=expires)
        IdempotencyKey.objects.create(user=oskar, route="jobs", key=name, body_digest="", thing_id=1)
        AccessAttempt.objects.create(username=name, get_data="", post_data="", failures_since_start=1)
        AccessLog.objects.create(username=name)
    IdempotencyKey.objects.filter(key="old").update(created_at=now - timedelta(hours=25))
    AccessAttempt.objects.filter(username="old").update(attempt_time=long_ago)
    AccessLog.objects.filter(username="old").update(attempt_time=long_ago)
    tidy()
    kinds: list[tuple[type[Model], str]] = [
        (LoginLink, "digest"), (IdempotencyKey, "key"), (AccessAttempt, "username"), (AccessLog, "username"),
    ]  # fmt: skip
    for kind, field in kinds:
        assert list(kind._default_manager.values_list(field, flat=True)) == ["new"], kind
    assert [session.get_decoded()["name"] for session in Session.objects.all()] == ["new"]
