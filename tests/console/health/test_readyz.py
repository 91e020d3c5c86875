"""Test /readyz, the home page's banner, /metrics and the command: each shows the findings to those who may see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client

from console.health import database, run
from console.health.finding import Finding
from portal.models import User

pytestmark = pytest.mark.django_db
DOWN = Finding(
    "processes", "worker.follow", "error", "The follow worker has not responded for 45 s.", "Process 7 on vm.", "Wait."
)
FULL = Finding("disk", "disk.home", "warning", "The disk of VIGIL_HOME is nearly full.", "/srv/vigil: 1 GB.", "Delete.")


@pytest.fixture(autouse=True)
def _no_report() -> Iterator[None]:
    run._latest = None
    yield
    run._latest = None


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    found: list[Finding] = []
    monkeypatch.setattr(run, "CHECKS", {"database": database.check, "processes": lambda: found})
    return found


def test_ready(client: Client, found: list[Finding]) -> None:
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "errors": [], "warnings": [], "unchecked": []})
    assert "no-store" in answer["Cache-Control"]


def test_not_ready_has_a_reason_but_nothing_that_only_sysadmins_may_know(client: Client, found: list[Finding]) -> None:
    found += [DOWN, FULL]
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer["Retry-After"] == "10"
    assert answer.json()["errors"] == [{"check": "processes", "code": "worker.follow", "message": DOWN.title}]
    assert [warning["code"] for warning in answer.json()["warnings"]] == ["disk.home"]
    text = client.get("/readyz", headers={"Accept": "text/plain"})
    assert text.status_code == 503
    assert text.content.decode().splitlines() == ["not ready", f"error: {DOWN.title}", f"warning: {FULL.title}"]
    for body in (answer.content, text.content):
        assert b"/srv" not in body
        assert b"vm" not in body


def test_a_warning_takes_no_portal_out_of_service(client: Client, found: list[Finding]) -> None:
    found.append(FULL)
    assert client.get("/readyz").status_code == 200
    assert client.head("/readyz").status_code == 200
    assert client.post("/readyz").status_code == 405


def test_a_load_balancer_checks_only_what_this_process_needs(client: Client, found: list[Finding]) -> None:
    """If a hung worker took both web processes out, no page could report it."""
    found.append(DOWN)
    assert client.get("/readyz").status_code == 503
    assert client.get("/readyz?only=web").status_code == 200


def test_checks_run_once_for_many_requests(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def check() -> list[Finding]:
        ran.append(1)
        return []

    monkeypatch.setattr(run, "CHECKS", {"processes": check})
    for _ in range(5):
        client.get("/readyz")
    assert len(ran) == 1


def test_the_banner_is_for_sysadmins(client: Client, found: list[Finding]) -> None:
    found.append(DOWN)
    run.current()
    client.force_login(User.objects.create_superuser("root"))
    page = client.get("/").content.decode()
    for text in (DOWN.title, DOWN.detail, DOWN.remedy):
        assert text in page
    client.force_login(User.objects.create_user("ada"))
    assert DOWN.title not in client.get("/").content.decode()


def test_metrics_name_the_check_that_fails(client: Client, found: list[Finding], settings: Any) -> None:
    settings.VIGIL_METRICS_TOKEN = "t" * 20
    found.append(DOWN)
    text = client.get("/metrics", headers={"Authorization": f"Bearer {'t' * 20}"}).content.decode()
    assert 'vigil_check_ok{check="processes"} 0' in text


def test_the_command_leaves_with_1(found: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    call_command("check_portal")
    printed = capsys.readouterr().out
    assert "✓ processes" in printed
    assert printed.endswith("0 errors, 0 warnings.\n")
    found.append(DOWN)
    with pytest.raises(SystemExit, match="1"):
        call_command("check_portal")
    assert capsys.readouterr().out.endswith("1 error, 0 warnings.\n")
    with pytest.raises(SystemExit, match="1"):
        call_command("check_portal", "--json")
    payload = json.loads(capsys.readouterr().out)
    assert not payload["ok"]
    assert payload["findings"][0]["detail"] == "Process 7 on vm."
