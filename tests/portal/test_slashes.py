"""Test page addresses with a slash too many or too few."""

import pytest
from django.test import Client

from portal.http import signposts
from tests import lab

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("requested", "there"),
    [
        ("/jobs/", "/jobs"),
        ("/submit/?from=7&x=%2F", "/submit?from=7&x=%2F"),
        ("/jobs/7/logs/", "/jobs/7/logs"),
        ("/disk/", "/disk"),
        ("/me", "/me/"),
        ("/accounts/login?next=/jobs", "/accounts/login/?next=/jobs"),
        ("/admin?x=1", "/admin/?x=1"),
        ("/nodes/", "/nodes"),
        ("/sweeps/", "/sweeps"),
        ("/api/v1/jobs/?state=failed&q=%2F", "/api/v1/jobs?state=failed&q=%2F"),
        ("/api/v1/jobs/7/logs/", "/api/v1/jobs/7/logs"),
    ],
)
def test_who_reads_is_sent_on(requested, there):
    for method in (Client().get, Client().head):
        answer = method(requested)
        assert (answer.status_code, answer.headers["Location"]) == (301, there)


def test_the_address_works_then():
    browser = lab.signed_in(lab.person("mira", lab.a_project()))
    assert browser.get("/jobs/", follow=True).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/nowhere/", "/jobs//", "//evil.example/", "//evil.example", "//jobs/", "/\\evil.example/", "/\t/evil.example/",
     "/api/v1/nothing/", "/api/v1/jobs//", "/api//evil.example/", "/api/nothing/"],
)  # fmt: skip
def test_nothing_else_is_sent_anywhere(path):
    answer = Client().get("/", PATH_INFO=path)  # as it is: the client would take "//…" for another site itself
    assert answer.status_code in {401, 404}
    assert "Location" not in answer.headers


def test_whoever_posts_is_not_sent_on():
    browser = lab.signed_in(lab.person("mira", lab.a_project()))
    for path in ("/submit/", "/me", "/jobs/cancel/"):
        assert browser.post(path).status_code == 404


@pytest.mark.parametrize(
    ("typed", "there"),
    [
        *((path, "/accounts/login/") for path in ("/login", "/login/", "/signin", "/signin/")),
        *((path, "/accounts/logout/") for path in ("/logout", "/logout/")),
        *((path, "/api/docs") for path in ("/api", "/api/", "/api/docs/", "/api/v1", "/api/v1/")),
        *((path, "/docs") for path in ("/documentation", "/help", "/manual")),
        ("/register", "/accounts/signup/"),
        ("/login?next=/jobs%3Fq%3Dx", "/accounts/login/?next=/jobs%3Fq%3Dx"),
        ("/profile", "/me/"),
        ("/dashboard", "/"),
        ("/job/7?rank=1", "/jobs/7?rank=1"),
        ("/node/dgx-01", "/nodes/dgx-01"),
        ("/openapi.json", "/api/openapi.json"),
    ],
)
def test_what_people_type_leads_somewhere(typed, there):
    for method in (Client().get, Client().head):
        answer = method(typed)
        assert (answer.status_code, answer.headers["Location"]) == (302, there)


def test_nothing_is_taken_where_people_are_sent_on():
    browser = lab.signed_in(lab.person("mira", lab.a_project()))
    for path in ("/login", "/logout", "/jobs/new"):
        assert browser.post(path).status_code == 405
    assert browser.get("/me/").status_code == 200, "still signed in"


def test_every_lead_arrives():
    browser = lab.signed_in(lab.sysadmin())
    for path in (path for paths in signposts.GUESSED_PATHS.values() for path in paths):
        arrives = 503 if "ready" in path else 200  # no worker runs here, and /readyz says so
        assert browser.get(f"/{path}", follow=True).status_code == arrives, path


@pytest.mark.parametrize("method", ["post", "put", "patch", "delete"])
def test_a_request_to_an_endpoint_with_a_slash_gets_the_right_address(method):
    client = lab.bearer(lab.person("mira", lab.a_project()), enforce_csrf_checks=True)
    answer = getattr(client, method)("/api/v1/jobs/", data="{}", content_type="application/json")
    assert answer.status_code == 404
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json()["type"] == "urn:vigil:problem:slash"
    assert f"{method.upper()} /api/v1/jobs." in answer.json()["detail"]


def test_below_api_every_refusal_is_a_problem_document():
    for path, status in (("/api", 405), ("/api/", 405), ("/api/v1", 405), ("/api/nowhere", 404)):
        answer = Client(enforce_csrf_checks=True).post(path)
        assert (answer.status_code, answer.headers["Content-Type"]) == (status, "application/problem+json")
