"""Test the frame of every page: theme, counts, error pages, static files."""

import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings
from django.test import Client, RequestFactory
from django.utils import timezone
from django.views.defaults import server_error

from nodes.models import HealthEntry
from tests.lab import a_job, a_project, person, signed_in, sysadmin

pytestmark = pytest.mark.django_db


def test_theme_comes_from_a_cookie_and_goes_into_it() -> None:
    client = Client()
    assert "data-theme" not in client.get("/accounts/login/").text
    client.post("/theme", {"theme": "dark"})
    assert '<html lang="en" data-theme="dark" data-zone="UTC">' in client.get("/accounts/login/").text
    client.post("/theme", {"theme": "system"})
    assert "data-theme" not in client.get("/accounts/login/").text
    client.cookies["theme"] = '"><script>'
    assert "<script>" not in client.get("/accounts/login/").text.split("<body")[0].replace("<script src", "")


def test_theme_returns_to_the_previous_page_and_to_no_other_site() -> None:
    client = Client()
    assert client.post("/theme", {"theme": "dark"}, headers={"referer": "http://testserver/jobs?q=x"}).url == (  # type: ignore[attr-defined]
        "http://testserver/jobs?q=x"
    )
    assert client.post("/theme", {"theme": "dark"}, headers={"referer": "https://evil.example/"}).url == "/"  # type: ignore[attr-defined]
    assert client.get("/theme").status_code == 405


def test_the_bar_counts_what_is_active() -> None:
    project = a_project()
    mira = person("mira", project)
    client = signed_in(mira)
    assert 'id="active-jobs" hidden' in client.get("/").text
    a_job(mira, project, state="running")
    a_job(mira, project, state="pending")
    a_job(mira, project, state="completed")
    html = client.get("/").text
    assert 'title="Pending or running">2</span>' in html


def test_the_bar_shows_sysadmins_what_waits_for_a_decision() -> None:
    for decision in ("proposed", "proposed", "dismissed"):
        HealthEntry.objects.create(
            node=f"dgx-{HealthEntry.objects.count()}", rule="off-bus", title="x", state="open", decision=decision,
            severity="fatal", action="drain", first_seen=timezone.now(), last_seen=timezone.now(),
        )  # fmt: skip
    assert 'title="Wait for a decision">2</span>' in signed_in(sysadmin("ops")).get("/jobs").text
    assert 'href="/health"' not in signed_in(person("mira")).get("/jobs").text


def test_pages_require_a_sign_in() -> None:
    for path in ("/", "/jobs", "/jobs/1", "/jobs/1/logs", "/submit", "/me/"):
        response = Client().get(path)
        assert response.status_code == 302, path
        assert response.url.startswith("/accounts/login/"), path  # type: ignore[attr-defined]


def test_error_pages_are_ours_and_keep_the_policy() -> None:
    response = Client().get("/nothing/here")
    assert response.status_code == 404
    assert "Page not found" in response.text
    assert "script-src 'self'" in response.headers["Content-Security-Policy"]
    assert " style=" not in response.text


def test_a_refusal_names_who_may_do_it() -> None:
    refused = signed_in(person("mira", a_project())).get("/drains/return")
    assert refused.status_code == 403
    assert "Only sysadmins can undrain nodes. Ask one of them." in refused.text
    assert "lead of the project" not in refused.text


def test_the_page_of_an_internal_error_needs_no_context() -> None:
    response = server_error(RequestFactory().get("/"))
    assert response.status_code == 500
    assert b"Vigil failed to show" in response.content


def test_forms_without_their_token_are_refused_kindly() -> None:
    response = Client(enforce_csrf_checks=True).post("/theme", {"theme": "dark"})
    assert response.status_code == 403
    assert "This form has expired" in response.text


def test_no_page_carries_inline_styles_or_scripts() -> None:
    project = a_project()
    mira = person("mira", project)
    job = a_job(mira, project, state="running")
    client = signed_in(mira)
    paths = [
        "/",
        "/jobs",
        "/submit",
        "/me/",
        *(f"/jobs/{job.pk}{tab}" for tab in ("", "/logs", "/checkpoints", "/attempts", "/spec")),
    ]
    for path in paths:
        response = client.get(path)
        assert response.status_code == 200, path
        html = response.text
        assert " style=" not in html, path
        assert "<style" not in html, path
        assert " onclick=" not in html, path
        for tag in html.split("<script")[1:]:
            assert ' src="' in tag.split(">")[0] or 'type="application/json"' in tag.split(">")[0], (path, tag[:80])


@pytest.mark.slow
def test_modules_still_find_each_other_under_hashed_names(tmp_path: Path) -> None:
    environment = {"VIGIL_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "DJANGO_SETTINGS_MODULE": "portal.settings"}
    command = [sys.executable, "manage.py", "collectstatic", "--noinput", "-v0"]
    subprocess.run(command, cwd=settings.BASE_DIR, env=environment, check=True, capture_output=True, timeout=120)
    collected = tmp_path / "static" / "js"
    for module in (Path(settings.BASE_DIR) / "static" / "js").glob("*.js"):
        hashed = next(collected.glob(f"{module.stem}.????????????.js"))
        for line in hashed.read_text().splitlines():
            if ' from "./' in line or 'import("./' in line:
                name = line.split('"./')[1].split('"')[0]
                assert (collected / name).exists(), (module.name, line)
                assert name.count(".") == 2, (module.name, line, "not hashed")
