"""Test that no page breaks on what people and scanners put into addresses."""

from __future__ import annotations

import pytest
from django.test import Client

from portal.models import Project, User
from tests.lab import a_job

pytestmark = pytest.mark.django_db

ODD = ["²", "9" * 5000, "-1", "%00", "1.5", "a%00b"]


@pytest.mark.parametrize("odd", ODD)
def test_the_list_leaves_out_what_it_cannot_read(client: Client, mira: User, project: Project, odd: str) -> None:
    for name in ("since", "q", "owner", "project", "kind", "tag", "state", "sort", "cursor"):
        answer = client.get(f"/jobs?{name}={odd}")
        assert answer.status_code in {200, 302, 400}, name
    assert client.get(f"/jobs?since={odd}d").status_code == 200


@pytest.mark.parametrize("odd", ["²", "9" * 5000, "-1"])
def test_other_pages_answer_plainly(client: Client, mira: User, project: Project, odd: str) -> None:
    job = a_job(mira, project, state="completed")
    assert client.get(f"/submit?from={odd}").status_code == 404
    assert client.post("/jobs/cancel", {"job": [odd, str(job.pk)]}).status_code == 302
    for name in ("rank", "attempt", "incarnation"):
        assert client.get(f"/jobs/{job.pk}/logs?{name}={odd}").status_code in {200, 404}, name
    assert client.post(f"/jobs/{job.pk}/resume", {"step": odd}).status_code == 302


@pytest.mark.parametrize(
    "back", ["0", "jobs", "<script>", "//evil.example/", "/\\evil.example", "a/b\nc", "javascript:alert(1)"]
)
def test_the_way_back_leads_to_a_page_of_ours(client: Client, mira: User, project: Project, back: str) -> None:
    job = a_job(mira, project, state="completed")
    for path in ("/jobs/cancel", f"/jobs/{job.pk}/cancel"):
        answer = client.post(path, {"back": back})
        assert answer.status_code == 302
        assert "evil" not in answer.headers["Location"]
        assert ":" not in answer.headers["Location"]
