"""Test combining several messages into one: at the end of quiet hours, by the hour or day, and in floods."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from portal import notify
from portal.models import Channel, Delivery, Notice, User
from portal.sending import due, gathering
from tests.portal.outbox import receiving
from tests.portal.outbox.notices import is_due, raise_notice_to, send
from tests.waiting import until

pytestmark = pytest.mark.django_db
Make = Callable[..., Channel]


class TestTogether:
    NIGHT = datetime(2026, 1, 10, 23, 0, tzinfo=UTC)

    @pytest.fixture(autouse=True)
    def _clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.NIGHT
        monkeypatch.setattr(timezone, "now", lambda: self.now)

    def test_after_quiet_hours_all_come_in_a_single_message(
        self, oskar: User, channel: Make, web: receiving.Web
    ) -> None:
        channel(quiet_from="22:00", quiet_until="07:00")
        for number in range(3):
            raise_notice_to(oskar, f"incident:{number}", title=f"job {number} died.")
        notify.withdraw("incident:1")
        assert send() == 0
        assert set(Delivery.objects.values_list("state", flat=True)) == {"held"}
        self.now = datetime(2026, 1, 11, 6, 59, tzinfo=UTC)
        assert send() == 0
        self.now = datetime(2026, 1, 11, 7, 0, tzinfo=UTC)
        assert send() == 1
        data = web.got[0].json["data"]
        assert [notice["title"] for notice in data["notices"]] == ["job 0 died.", "job 2 died."]
        assert data["title"].replace("\N{NO-BREAK SPACE}", " ").startswith("2 notifications since ")
        assert data["title"].endswith("\N{NO-BREAK SPACE}UTC")
        assert sorted(Delivery.objects.values_list("kind", "state")) == [
            ("digest", "sent"), ("incident", "dropped"), ("incident", "gathered"), ("incident", "gathered"),
        ]  # fmt: skip
        assert send() == 0

    def test_what_failed_is_tried_again_after_quiet_hours(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        channel(quiet_from="23:00", quiet_until="07:00")
        self.now -= timedelta(seconds=5)
        raise_notice_to(oskar)
        web.answers = [receiving.status(500)]
        assert send() == 1
        self.now = datetime(2026, 1, 11, 6, 59, tzinfo=UTC)
        assert send() == 0
        self.now = datetime(2026, 1, 11, 7, 0, tzinfo=UTC)
        assert send() == 1

    def test_a_single_notice_is_no_digest(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        channel(digest="hourly")
        raise_notice_to(oskar)
        self.now += timedelta(hours=1)
        assert send() == 1
        assert web.got[0].json["type"] == "notice.incident"

    def test_daily(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        channel(digest="daily", time_zone="Europe/Berlin")
        for number in range(120):
            raise_notice_to(oskar, f"incident:{number}")
        self.now = datetime(2026, 1, 11, 7, 0, tzinfo=UTC)
        assert send() == 1
        data = web.got[0].json["data"]
        assert (len(data["notices"]), data["more"]) == (100, 20)

    def test_many_at_once_go_as_a_single_message(self, oskar: User, channel: Make, web: receiving.Web) -> None:
        """Four hundred jobs that die in a minute are no four hundred letters."""
        channel()
        for number in range(6):
            raise_notice_to(oskar, f"incident:{number}")
        assert send() == 1
        assert len(web.got[0].json["data"]["notices"]) == 6


@pytest.mark.skipif(connection.vendor != "postgresql", reason="On SQLite one writes at a time")
@pytest.mark.django_db(transaction=True)
def test_four_workers_make_a_single_digest(oskar: User, channel: Make, web: receiving.Web) -> None:
    channel(digest="hourly")
    for number in range(40):
        raise_notice_to(oskar, f"incident:{number}")
    is_due()
    together = threading.Barrier(4, timeout=60)

    def gather(_: int) -> None:
        try:
            together.wait()
            gathering.release_held(timezone.now())
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(gather, range(4)))) == 4
    assert Delivery.objects.get(kind="digest").carries.count() == 40
    assert Delivery.objects.count() == 41


@pytest.mark.skipif(connection.vendor != "postgresql", reason="On SQLite one writes at a time")
@pytest.mark.django_db(transaction=True)
def test_who_sends_takes_nothing_that_is_being_gathered(
    oskar: User, channel: Make, web: receiving.Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel()
    for number in range(6):
        raise_notice_to(oskar, f"incident:{number}")
    now, make = timezone.now(), gathering.content_of
    going: list[Future[int]] = []

    def take() -> int:
        try:
            return len(due._take(now))
        finally:
            connection.close()

    def is_stuck() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            return bool(cursor.fetchone()[0])

    def meanwhile(notice: Notice) -> dict[str, Any]:
        if not going:
            going.append(pool.submit(take))
            until(lambda: going[0].done() or is_stuck())
        return make(notice)

    monkeypatch.setattr(gathering, "content_of", meanwhile)
    with ThreadPoolExecutor(1) as pool:
        gathering.release_held(now)
        assert going[0].result() == 0
    assert Delivery.objects.get(kind="digest").carries.filter(tries=0).count() == 6
