"""Provide a person to notify, and receivers that the site has allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from portal.models import Channel, User
from tests.lab import a_project, person
from tests.portal.outbox import receiving


@pytest.fixture
def oskar(db: None) -> User:
    return person("oskar", a_project(), email="oskar@lab.example")


@pytest.fixture
def web(settings: Any) -> Iterator[receiving.Web]:
    settings.VIGIL_WEBHOOK_ALLOW = "127.0.0.0/8"
    with receiving.web() as state:
        yield state


@pytest.fixture
def channel(oskar: User, web: receiving.Web) -> Callable[..., Channel]:
    """Return a function that makes a channel of Oskar's, by default a webhook to `web`."""

    def make(**fields: Any) -> Channel:
        given = {"kind": "webhook", "address": web.url}
        owner = {} if "project" in fields else {"user": oskar}
        return Channel.objects.create(**{**given, **owner, **fields})

    return make
