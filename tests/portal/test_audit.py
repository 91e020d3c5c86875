"""Test the audit log: values before and after, the client's address, and never a secret."""

from __future__ import annotations

import pytest
from asgiref.sync import async_to_sync
from django.test import AsyncClient, Client
from django.utils import timezone

from portal import audit
from portal.audit import Change
from portal.models import AuditEntry, Membership, Token, User
from portal.notices import channels
from tests import lab
from tests.lab import send

pytestmark = pytest.mark.django_db


@pytest.fixture
def browser() -> Client:
    return lab.signed_in(lab.sysadmin(), REMOTE_ADDR="192.0.2.7")


def person_form(user: User, **changes: str) -> dict[str, str]:
    form = {"username": user.username, "is_active": "on", **changes}
    rows = {"memberships-TOTAL_FORMS": "0", "memberships-INITIAL_FORMS": "0"}
    return {name: value for name, value in {**rows, **form}.items() if value}


def test_a_changed_person_is_stored_before_and_after_with_the_address(browser: Client) -> None:
    mo = lab.person("mo", email="mo@old.example")
    form = person_form(mo, is_superuser="on", email="mo@new.example")
    assert browser.post(f"/admin/portal/user/{mo.pk}/change/", form).status_code == 302
    entry = AuditEntry.objects.get()
    assert (entry.action, entry.thing, entry.address) == ("user.changed", "mo", "192.0.2.7")
    assert entry.before == {"email": "mo@old.example", "is_superuser": False}
    assert entry.after == {"email": "mo@new.example", "is_superuser": True}
    page = browser.get("/admin/portal/auditentry/").text
    assert f"{timezone.localtime(entry.at):%Y-%m-%d %H:%M:%S}" in page
    assert "is_superuser: False → True" in page
    assert "192.0.2.7" in page
    assert "mo@new.example" in browser.get(f"/admin/portal/auditentry/{entry.pk}/change/").text


def test_added_changed_and_removed_memberships_are_stored(browser: Client) -> None:
    mo, project = lab.person("mo"), lab.a_project()
    path = f"/admin/portal/user/{mo.pk}/change/"
    row = {"memberships-TOTAL_FORMS": "1", "memberships-0-user": str(mo.pk), "memberships-0-project": str(project.pk)}
    browser.post(path, person_form(mo, **row, **{"memberships-0-role": "researcher"}))
    assert AuditEntry.objects.latest("pk").after == {"membership mo in default": "role researcher"}
    there = {"memberships-INITIAL_FORMS": "1", "memberships-0-id": str(Membership.objects.get().pk)}
    browser.post(path, person_form(mo, **row, **there, **{"memberships-0-role": "lead"}))
    entry = AuditEntry.objects.latest("pk")
    assert entry.before == {"membership mo in default, role": "researcher"}
    assert entry.after == {"membership mo in default, role": "lead"}
    browser.post(path, person_form(mo, **row, **there, **{"memberships-0-role": "lead", "memberships-0-DELETE": "on"}))
    entry = AuditEntry.objects.latest("pk")
    assert (entry.before, entry.after) == ({"membership mo in default": "role lead"}, {})


def test_no_secret_is_stored(browser: Client) -> None:
    mo = lab.person("mo")
    _, secret = Token.issue(mo, "laptop")
    fields = {"password1": "quite new indeed", "password2": "quite new indeed", "usable_password": "true"}
    browser.post(f"/admin/portal/user/{mo.pk}/password/", {**fields, "revoke_tokens": "on"})
    entry = AuditEntry.objects.get()
    assert entry.after == {"password": "•••", "revoked": "1\N{NO-BREAK SPACE}API token"}
    project = lab.a_project()
    environment = '[env]\nWANDB_API_KEY = "0123456789abcdef0123456789abcdef01234567"\n'
    rows = {"memberships-TOTAL_FORMS": "0", "memberships-INITIAL_FORMS": "0"}
    form = {"slug": project.slug, "title": "x", "job_environment": f"# {secret}\n{environment}", **rows}
    assert browser.post(f"/admin/portal/project/{project.pk}/change/", form).status_code == 302
    browser.post(f"/admin/portal/user/{mo.pk}/delete/", {"post": "yes"})
    sam = User.objects.get(username="sam")
    hook = "https://hooks.slack.example/services/T0/B0/verysecretpath"
    channel = channels.make(sam, project, "slack", {"address": hook})
    channels.change(sam, channel, {"address": f"{hook}2", "is_paused": True})
    channels.remove(sam, channel)
    stored = str(list(AuditEntry.objects.values_list("before", "after", "detail", "thing")))
    assert "title" in stored
    assert "is_paused" in stored
    for word in (secret, "0123456789abcdef", "quite new", "verysecretpath", mo.password):
        assert word not in stored


def test_the_address_is_the_connections_whatever_a_header_claims(browser: Client) -> None:
    """Behind a trusted proxy the server puts the client's in its place before Django sees the request."""
    project = lab.a_project()
    headers = {"X_Forwarded_For": "203.0.113.9", "Forwarded": "for=203.0.113.9", "X_Real_IP": "203.0.113.9"}
    body = {"keep_checkpoints_days": 30}
    assert send(browser, "patch", f"/api/v1/projects/{project.slug}", body, **headers).status_code == 200
    entry = AuditEntry.objects.get()
    assert entry.address == "192.0.2.7"
    assert (entry.before, entry.after) == ({"keep_checkpoints_days": None}, {"keep_checkpoints_days": 30})


@pytest.mark.parametrize(
    ("address", "stored"), [("::ffff:192.0.2.7", "192.0.2.7"), ("2001:db8::1", "2001:db8::1"), ("", None), ("x", None)]
)
def test_addresses_of_all_kinds(address: str, stored: str | None) -> None:
    lab.a_project()
    browser = lab.signed_in(lab.sysadmin(), REMOTE_ADDR=address)
    send(browser, "patch", "/api/v1/projects/default", {"keep_checkpoints_days": 30})
    assert AuditEntry.objects.get().address == stored


def test_threads_that_answer_know_the_address() -> None:
    """The request runs as in the real server: asynchronous outside, views in a thread."""
    sam = lab.sysadmin()
    lab.a_project()

    async def change() -> int:
        browser = AsyncClient()
        await browser.aforce_login(sam, backend="allauth.account.auth_backends.AuthenticationBackend")
        body = {"keep_checkpoints_days": 9}
        answer = await browser.patch("/api/v1/projects/default", body, content_type="application/json")
        return int(answer.status_code)

    assert async_to_sync(change)() == 200
    assert AuditEntry.objects.get().address == "127.0.0.1"


def test_only_differences_are_stored_and_they_are_bounded() -> None:
    before, after = Change(before={"a": 1, "b": 2, "c": "x"}, after={"a": 1, "b": 3, "d": "y" * 5_000}).stored()
    assert before == {"b": 2, "c": "x"}
    assert after["b"] == 3
    assert len(after["d"]) == audit.MAX_CHARACTERS
    many = Change(after={str(number): number for number in range(500)}).stored()[1]
    assert len(many) == audit.MAX_VALUES
    assert audit.sentence({"tags": []}, {"tags": ["a", "b"]}) == "tags: nothing → a, b"
    assert audit.sentence({"b": 2, "c": "x"}, {"b": 3, "d": "y"}) == "b: 2 → 3; c: x → gone; d: y"
