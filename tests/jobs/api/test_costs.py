"""Test that a hostile specification is refused within milliseconds, at every address that takes one."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from portal.models import Project
from tests.lab import signed_in, sysadmin

pytestmark = pytest.mark.django_db
DOTTED = ".".join(["a"] * 32_700) + "=1"
DEEP = '{"spec": {"name": "x", "run": ' + '{"a":' * 500 + "1" + "}" * 502
BELOW_A_HEADER = "[t]\n" + "".join(f"a.k{i} = 1\n" for i in range(5_000))


def toml(text: str) -> dict[str, Any]:
    return {"data": text, "content_type": "application/toml"}


def body(**sent: Any) -> dict[str, Any]:
    return {"data": json.dumps(sent), "content_type": "application/json"}


@pytest.mark.parametrize("address", ["jobs", "jobs/check", "sweeps"])
@pytest.mark.parametrize(
    "sent",
    [
        toml(DOTTED), toml(BELOW_A_HEADER), body(spec_toml=DOTTED), {"data": {"spec_toml": DOTTED}},
        {"data": DEEP, "content_type": "application/json"}, body(spec={f"k{i}": 1 for i in range(50_000)}),
        body(spec={"name": "x", "tags": list(range(100_000))}),
    ],
)  # fmt: skip
def test_rest(client: Client, address: str, sent: dict[str, Any]) -> None:
    client.get("/healthz")  # has the addresses of the site loaded
    began = time.process_time()
    answer = client.post(f"/api/v1/{address}", **sent)
    assert time.process_time() - began < 1
    assert answer.status_code == 422, answer.content
    assert "more than" in answer.json()["detail"]


def test_a_file(client: Client) -> None:
    answer = client.post("/api/v1/jobs", {"spec_toml": SimpleUploadedFile("job.toml", DOTTED.encode())})
    assert "more than" in answer.json()["detail"]


@pytest.mark.parametrize("text", [DOTTED, BELOW_A_HEADER])
@pytest.mark.parametrize("address", ["/submit", "/submit/sync"])
def test_the_form(mira: Any, address: str, text: str) -> None:
    person = signed_in(mira)
    person.get("/healthz")
    began = time.process_time()
    answer = person.post(address, {"toml": text, "do": "submit", "name": "other", "side": "form"})
    assert time.process_time() - began < 2
    assert "more than" in answer.text


def test_a_project_and_the_catalogue(project: Project) -> None:
    ops = signed_in(sysadmin())
    path = f"/admin/portal/project/{project.pk}/change/"
    form = {"slug": project.slug, "title": "", "memberships-TOTAL_FORMS": 0, "memberships-INITIAL_FORMS": 0}
    long = ".".join(["a"] * 9_000) + "=1"
    ops.get("/admin/")
    began = time.process_time()
    for field in ("restart_on", "job_environment"):
        assert "a key of more than 8 parts" in ops.post(path, {**form, field: long}).text
    assert "a key of more than 4 parts" in ops.post("/catalogue/take", {"text": DOTTED}).text
    assert (
        "digits" in ops.post("/catalogue/take", {"text": "x = " + "9" * 5_000}).text
    )  # this was once answered with 500
    assert time.process_time() - began < 3
