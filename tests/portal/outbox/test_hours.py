"""Test when messages may be sent: quiet hours over midnight and clock changes, digests on the hour and at eight."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portal.outbox.hours import DeliveryHours, zone_of, zones

NIGHT = (time(22), time(7))
BERLIN = "Europe/Berlin"


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("quiet", "moment", "until"),
    [
        (NIGHT, "2026-01-10T20:59", None),  # 21:59 in Berlin
        (NIGHT, "2026-01-10T21:00", "2026-01-11T06:00"),
        (NIGHT, "2026-01-11T02:00", "2026-01-11T06:00"),
        (NIGHT, "2026-01-11T05:59", "2026-01-11T06:00"),
        (NIGHT, "2026-01-11T06:00", None),
        ((time(12), time(13)), "2026-01-11T11:30", "2026-01-11T12:00"),
        ((time(12), time(13)), "2026-01-11T12:00", None),
        # The last Sunday of March: 02:00 is 03:00. The night is an hour shorter.
        (NIGHT, "2026-03-28T22:30", "2026-03-29T05:00"),
        # 02:30 is skipped: it is as long after midnight as it says, 03:30 by the new clock.
        ((time(22), time(2, 30)), "2026-03-28T22:30", "2026-03-29T01:30"),
        # The last Sunday of October: 02:00 to 03:00 comes twice.
        (NIGHT, "2026-10-24T20:30", "2026-10-25T06:00"),
        ((time(22), time(2, 30)), "2026-10-24T23:50", "2026-10-25T00:30"),
        ((time(22), time(2, 30)), "2026-10-25T01:10", "2026-10-25T01:30"),  # 02:10 for the second time
    ],
)
def test_quiet_until(quiet: tuple[time, time], moment: str, until: str | None) -> None:
    found = DeliveryHours(BERLIN, quiet).quiet_until(at(moment))
    assert found == (at(until) if until else None)


@pytest.mark.parametrize(
    ("digest", "moment", "due"),
    [
        ("hourly", "2026-01-10T20:00", "2026-01-10T21:00"),
        ("hourly", "2026-01-10T20:59", "2026-01-10T21:00"),
        ("daily", "2026-01-10T06:59", "2026-01-10T07:00"),
        ("daily", "2026-01-10T07:00", "2026-01-11T07:00"),
        ("daily", "2026-03-28T12:00", "2026-03-29T06:00"),
        ("", "2026-01-10T20:00", "2026-01-10T20:00"),
    ],
)
def test_digests(digest: str, moment: str, due: str) -> None:
    assert DeliveryHours(BERLIN, digest=digest).due(at(moment)) == (at(due), bool(digest))


def test_an_hourly_digest_waits_for_the_end_of_the_night() -> None:
    assert DeliveryHours(BERLIN, NIGHT, "hourly").due(at("2026-01-10T20:30")) == (at("2026-01-11T06:00"), True)


@given(
    moment=st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 31), timezones=st.just(UTC)),
    start=st.times(), end=st.times(), zone=st.sampled_from(["UTC", BERLIN, "America/St_Johns", "Australia/Lord_Howe"]),
    digest=st.sampled_from(["", "hourly", "daily"]),
)  # fmt: skip
def test_it_always_goes_within_two_days_and_never_before(
    moment: datetime, start: time, end: time, zone: str, digest: str
) -> None:
    hours = DeliveryHours(zone, (start, end), digest)
    due, is_delayed = hours.due(moment)
    assert moment <= due <= moment + timedelta(hours=50)
    assert is_delayed == (due > moment)


def test_zones() -> None:
    assert {"UTC", BERLIN, "America/New_York"} <= set(zones())
    assert str(zone_of("Middle/Earth")) == str(zone_of("../../etc/passwd")) == str(zone_of("")) == "UTC"
