"""Test that no cache may store Vigil's answers."""

import asyncio
from typing import Any

import pytest
from django.test import Client

from jobs.api.reports import FAST_PATH
from portal.http import limits
from portal.http.posts import Intake
from tests.lab import a_job, a_project, bearer, person, signed_in

pytestmark = pytest.mark.django_db
PRIVATE = "private, no-store"


PAGES = (
    "/", "/jobs", "/submit", "/me/", "/disk", "/nodes", "/jobs/{job}", "/jobs/{job}/spec.toml", "/jobs/{job}/life",
    "/jobs/{job}/logs/download", "/jobs/999999", "/jobs/", "/admin/", "/healthz", "/nowhere",
)  # fmt: skip


@pytest.mark.parametrize("path", PAGES)
def test_pages_fragments_downloads_redirects_and_refusals(path: str) -> None:
    project = a_project()
    mira = person("mira", project)
    path = path.replace("{job}", str(a_job(mira, project).pk))
    assert signed_in(mira).get(path).headers["Cache-Control"] == PRIVATE


@pytest.mark.parametrize(
    "path", ["me", "jobs", "jobs/999999", "jobs?limit=x", "nowhere", "openapi.json", "spec/schema"]
)
def test_the_api_and_its_problem_documents(path: str) -> None:
    client = bearer(person("mira", a_project()))
    assert client.get(f"/api/v1/{path}").headers["Cache-Control"] == PRIVATE
    assert Client().get(f"/api/v1/{path}").headers["Cache-Control"] == PRIVATE


def test_what_is_answered_before_django() -> None:
    for application, scope in (
        (Intake(None, [FAST_PATH]), {"path": "/api/v1/attempts/1/reports", "headers": []}),  # type: ignore[arg-type]
        (limits.BodyLimit(None), {"path": "/jobs", "headers": [(b"content-length", b"9999999999")]}),  # type: ignore[arg-type]
    ):
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: Any, sent: list[dict[str, Any]] = sent) -> None:
            sent.append(message)

        if isinstance(application, Intake):
            application.waiting = 10**6  # too many in progress: answered without the database
        asyncio.run(application({"type": "http", "method": "POST", **scope}, receive, send))
        assert (b"cache-control", PRIVATE.encode()) in sent[0]["headers"]
