"""Shared fixtures of the socket tests: a private Redis, and ada, who may see the default project."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import LazySettings

from portal import publish
from portal.models import Membership, Project, User
from tests.redis import Server, redis_up


@pytest.fixture
def server(tmp_path: Path, settings: LazySettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with redis_up(tmp_path / "redis") as server:
        settings.REDIS_URL = server.url
        monkeypatch.setattr(publish, "_silent_until", 0.0)
        publish.connection.cache_clear()
        yield server
    publish.connection.cache_clear()


@pytest.fixture
def ada() -> User:
    user = User.objects.create_user("ada")
    project = Project.objects.create(slug="default")
    Membership.objects.create(user=user, project=project)
    return user
