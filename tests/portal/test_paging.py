"""Test that every list refuses forged cursors, whatever value they contain."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from typing import Any

import pytest

from tests.lab import a_project, bearer, person

pytestmark = pytest.mark.django_db

LISTS = {"/api/v1/notices": "-raised_at", "/api/v1/queue": "place", "/api/v1/postmortems": "-at"}
VALUES: list[Any] = ["x", True, 1, -1e308, 10**30, float("nan"), float("inf"), [], {}, {"time": "x"}, {"time": 1}]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_cursor_with_a_value_of_another_type_is_refused(value: Any) -> None:
    client = bearer(person("oskar", a_project()), "read")
    for path, order in LISTS.items():
        cursor = urlsafe_b64encode(json.dumps([order, value, 1]).encode()).decode().rstrip("=")
        answer = client.get(path, {"cursor": cursor})
        if path == "/api/v1/queue" and value in (1, True):  # a place in the queue is a number
            assert answer.status_code == 200
        else:
            assert answer.status_code == 422, (path, answer.content)
            assert answer.json()["errors"][0]["field"] == "cursor"
