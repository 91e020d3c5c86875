"""Announcements: everybody sees them between their times, as text; only sysadmins write them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import unquote

import pytest
from django.utils import timezone

from portal.announcements import current
from portal.models import Announcement, AuditEntry, User
from tests.lab import a_project, bearer, person, signed_in, sysadmin

pytestmark = pytest.mark.django_db
ADDRESS = "/api/v1/announcements"


@pytest.fixture(autouse=True)
def _uncached() -> Iterator[None]:
    current.forget()
    yield
    current.forget()


@pytest.fixture
def ops() -> User:
    return sysadmin("ops")


@pytest.fixture
def mira() -> User:
    return person("mira", a_project())


def announce(user: User, text: str = "Maintenance on Saturday", **more: Any) -> Any:
    client = bearer(user, "admin" if user.is_sysadmin else "submit")
    return client.post(ADDRESS, {"text": text, **more}, content_type="application/json")


def test_everybody_sees_it_at_home_on_submit_and_by_rest(ops: User, mira: User) -> None:
    answer = announce(ops, level="warning")
    assert answer.status_code == 201
    for page in ("/", "/submit", "/announcements"):
        assert "Maintenance on Saturday" in signed_in(mira).get(page).text
    (item,) = bearer(mira, "read").get(ADDRESS).json()["items"]
    assert (item["text"], item["level"], item["is_shown"], item["written_by"]) == (
        "Maintenance on Saturday", "warning", True, "ops",
    )  # fmt: skip
    assert AuditEntry.objects.get(user=ops).action == "announcement.made"
    withdrawn = bearer(ops, "admin").post(f"{ADDRESS}/{item['id']}/withdraw").json()
    assert withdrawn["withdrawn_at"]
    assert "Maintenance on Saturday" not in signed_in(mira).get("/").text
    assert bearer(mira, "read").get(ADDRESS).json()["items"] == []
    assert bearer(ops, "admin").post(f"{ADDRESS}/{item['id']}/withdraw").status_code == 409, "it is over already"


def test_only_sysadmins_see_what_is_planned_or_withdrawn(ops: User, mira: User) -> None:
    now = timezone.now()
    announce(ops, "shown")
    announce(ops, "planned", starts_at=(now + timedelta(hours=1)).isoformat())
    Announcement.objects.create(text="withdrawn", starts_at=now - timedelta(hours=2), withdrawn_at=now)
    Announcement.objects.create(text="past", starts_at=now - timedelta(hours=2), ends_at=now - timedelta(hours=1))
    for user, expected in ((ops, {"shown", "planned", "withdrawn", "past"}), (mira, {"shown", "past"})):
        items = bearer(user, "read").get(ADDRESS, {"all": True}).json()["items"]
        assert {item["text"] for item in items} == expected
        page = signed_in(user).get("/announcements").text
        found = {
            text
            for text in ("shown", "planned", "withdrawn", "past")
            if f"<b>{text}</b>" in page or f"<span>{text}</span>" in page
        }
        assert found == expected


def test_only_between_its_times(ops: User, mira: User) -> None:
    now = timezone.now()
    announce(ops, "later", starts_at=(now + timedelta(hours=1)).isoformat())
    announce(ops, "soon over", ends_at=(now + timedelta(hours=1)).isoformat())
    assert [row.text for row in current.current()] == ["soon over"]
    Announcement.objects.update(ends_at=now - timedelta(seconds=1))
    current.forget()
    assert current.current() == ()
    page = signed_in(mira).get("/announcements").text
    assert "Nothing is announced." in page


def test_the_most_urgent_come_first_and_few_are_shown(ops: User) -> None:
    for number in range(7):
        announce(ops, f"info {number}")
    announce(ops, "fire", level="critical")
    shown = [row.text for row in current.current()]
    assert (shown[0], len(shown)) == ("fire", 5)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"text": " "}, "text"), ({"text": "x" * 401}, "text"), ({"text": "a\u202eb"}, "text"),
        ({"level": "loud"}, "level"), ({"ends_at": "2020-01-01T00:00:00Z"}, "ends_at"),
        ({"starts_at": "2999-01-01T00:00:00Z"}, "starts_at"), ({"starts_at": "2026-01-01T00:00:00"}, "starts_at"),
        ({"colour": "red"}, "colour"),
    ],
)  # fmt: skip
def test_refuses_what_cannot_be_shown(ops: User, body: dict[str, Any], field: str) -> None:
    answer = announce(ops, **{"text": "x", **body})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field
    assert not Announcement.objects.exists()


def test_only_sysadmins_write(ops: User, mira: User) -> None:
    assert announce(mira).status_code == 403
    assert bearer(ops, "submit").post(ADDRESS, {"text": "x"}, content_type="application/json").status_code == 403
    assert signed_in(mira).post("/announcements", {"text": "x", "level": "info"}).status_code == 403
    row = Announcement.objects.create(text="x", written_by=ops)
    assert bearer(mira, "submit").post(f"{ADDRESS}/{row.pk}/withdraw").status_code == 403
    assert signed_in(mira).post(f"/announcements/{row.pk}/withdraw").status_code == 403
    assert '<form method="post" action="/announcements"' not in signed_in(mira).get("/announcements").text


def test_sysadmins_write_on_the_page(ops: User) -> None:
    client = signed_in(ops)
    assert client.post("/announcements", {"text": "", "level": "info"}).status_code == 422
    refused = client.post("/announcements", {"text": "x", "level": "info", "ends_at": "soon"})
    assert refused.status_code == 422
    assert re.findall(r'id="(\w+)"[^>]* aria-invalid="true"', refused.text) == ["ends_at"]
    sent = {"text": "<b>bold</b>", "level": "critical", "ends_at": "2999-01-01T00:00"}
    assert "more than a year" in client.post("/announcements", sent).text
    assert client.post("/announcements", {**sent, "ends_at": ""}).status_code == 302
    assert "&lt;b&gt;bold&lt;/b&gt;" in client.get("/").text
    row = Announcement.objects.get()
    assert client.post(f"/announcements/{row.pk}/withdraw").status_code == 302
    assert client.post("/announcements/99999999999999999999/withdraw").status_code == 404


def test_only_the_command_gets_a_header(ops: User, mira: User) -> None:
    announce(ops, "Ünder, 50 % \u2013 soon")
    client = bearer(mira, "read")
    header = client.get("/api/v1/nodes", headers={"User-Agent": "vigil-cli"}).headers[current.HEADER]
    assert header == "info;%C3%9Cnder%2C 50 %25 %E2%80%93 soon"
    assert current.HEADER not in client.get("/api/v1/nodes").headers
    refused = client.get("/api/v1/nodes/nowhere", headers={"User-Agent": "vigil-cli"})
    assert current.HEADER not in refused.headers


@pytest.mark.parametrize("text", ["x" * 400, "日" * 400, "Пятница " * 50, "🔥" * 400, "," * 400])
def test_the_header_of_many_long_texts_fits_into_a_proxys_buffer(ops: User, text: str) -> None:
    for number in range(6):
        announce(ops, f"{number} {text}"[:400], level="critical")
    header = bearer(ops, "read").get("/api/v1/nodes", headers={"User-Agent": "vigil-cli"}).headers[current.HEADER]
    assert len(header) <= 2_000
    parts = [unquote(part.removeprefix("critical;")) for part in header.split(",")]
    assert [part[0] for part in parts] == ["5", "4", "3", "2", "1"]
    assert all(part.endswith("…") and len(part) > 30 for part in parts)


def test_the_header_has_a_long_text_as_a_whole(ops: User) -> None:
    announce(ops, "Wartung für alle: " + "x" * 380)
    header = bearer(ops, "read").get("/api/v1/nodes", headers={"User-Agent": "vigil-cli"}).headers[current.HEADER]
    assert unquote(header) == "info;Wartung für alle: " + "x" * 380


def test_reading_them_costs_a_query_in_five_seconds(ops: User, mira: User, django_assert_num_queries: Any) -> None:
    announce(ops)
    current.current()
    with django_assert_num_queries(0):
        assert len(current.current()) == 1


@pytest.mark.parametrize("starts_at", ["0001-01-01T00:00", "1600-02-29T12:00", "9999-12-31T23:59"])
def test_times_that_no_calendar_needs_are_refused(ops: User, settings: Any, starts_at: str) -> None:
    settings.TIME_ZONE = "America/New_York"
    assert announce(ops, starts_at=f"{starts_at}Z").status_code == 422
    form = {"text": "hello", "level": "info", "starts_at": starts_at}
    assert signed_in(ops).post("/announcements", form).status_code == 422
    assert not Announcement.objects.exists()


def test_no_page_fails_on_a_time_that_no_calendar_needs(mira: User, settings: Any) -> None:
    settings.TIME_ZONE = "America/New_York"
    Announcement.objects.create(text="old", level="info", starts_at=datetime(1, 1, 1, tzinfo=UTC))
    assert signed_in(mira).get("/").status_code == 200
    assert signed_in(mira).get("/announcements").status_code == 200
