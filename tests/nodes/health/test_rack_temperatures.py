"""What agents report becomes inlet temperatures of racks, on the page, over REST, and as a finding."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.core.cache import cache
from django.utils import timezone

from jobs.failures import temperatures
from jobs.failures.temperatures import failures_by_inlet
from jobs.models import Failure
from nodes.models import Agent, HealthEntry, RackPlace, RackTemperature
from nodes.monitoring.evaluate import evaluate
from nodes.monitoring.temperatures import measure
from tests.lab import a_project, bearer, person, signed_in, sysadmin
from tests.nodes.remediation.cluster import NAMES, Lab, evaluate_until

pytestmark = pytest.mark.django_db
RACKS = {rack: (NAMES[place],) for place, rack in enumerate("ABCD")}


@pytest.fixture(autouse=True)
def _nothing_cached() -> None:
    cache.clear()


@pytest.fixture
def lab() -> Lab:
    lab = Lab(names=NAMES[:4])
    for rack, names in RACKS.items():
        RackPlace.objects.bulk_create(RackPlace(node=name, rack=rack) for name in names)
        for name in names:
            lab.machine(name)
    return lab


def report(lab: Lab, at: datetime, inlets: dict[str, float], watts: float = 300.0, *, measured: bool = False) -> None:
    """Let all agents report what GPUs of 0.05 °C per watt would at these inlets, without 240 posts."""
    for rack, names in RACKS.items():
        for name in names:
            agent = Agent.objects.get(node=name)
            gpu = {"temperature_c": inlets[rack] + 0.05 * watts, "watts": watts}
            host = {"inlet_c": inlets[rack]} if measured else {}
            newest = {"gpus": dict.fromkeys(lab.machine(name).gpus, gpu), "host": host}
            Agent.objects.filter(pk=agent.pk).update(newest=newest, sampled_at=int(at.timestamp()), heard_at=at)


def live(lab: Lab, start: datetime, minutes: int, inlets: dict[str, float], **more: Any) -> datetime:
    """Pass minutes in which nodes change their load every ten."""
    at = start
    for minute in range(minutes):
        at = start + timedelta(minutes=minute)
        report(lab, at, inlets, 100.0 if minute // 10 % 2 else 500.0, **more)
        measure(at)
    return at


USUAL = {"A": 21.0, "B": 21.0, "C": 22.0, "D": 21.0}
WARM = {**USUAL, "B": 24.5}


def test_a_warm_rack_is_a_finding_after_an_hour_with_its_estimate(lab: Lab) -> None:
    at = live(lab, timezone.now(), 65, USUAL)
    evaluate(at)
    assert not HealthEntry.objects.active().filter(rule="rack-warm").exists()
    found = {inlet.rack: inlet for inlet in measure(at)}
    assert found["B"].inlet_c == pytest.approx(21.0, abs=0.3)
    assert found["B"].is_estimate
    at = live(lab, at + timedelta(minutes=10), 10, WARM)
    evaluate_until(at + timedelta(minutes=61), at)
    entry = HealthEntry.objects.open().get(rule="rack-warm")
    assert (entry.node, entry.item, entry.action) == ("", "B", "watch")
    assert entry.evidence[-1][2]["is_estimate"] is True
    assert entry.evidence[-1][2]["above_neighbours_c"] > 2
    page = signed_in(sysadmin("ops")).get("/health").content.decode()
    assert "Rack takes in warmer air than its neighbours" in page
    assert "on rack B" in page


def test_measured_temperatures_need_no_learning(lab: Lab) -> None:
    now = timezone.now()
    report(lab, now, WARM, measured=True)
    found = {inlet.rack: inlet for inlet in measure(now)}
    assert (found["B"].inlet_c, found["B"].is_estimate, found["B"].above_neighbours_c) == (24.5, False, 3.5)


def test_temperatures_below_zero_are_measured(lab: Lab) -> None:
    now = timezone.now()
    report(lab, now, {**USUAL, "B": -4.0}, measured=True)
    assert {inlet.rack: inlet.inlet_c for inlet in measure(now)}["B"] == -4.0


def test_a_bmc_that_lies_is_not_believed(lab: Lab) -> None:
    now = timezone.now()
    report(lab, now, dict.fromkeys(RACKS, 900.0), measured=True)
    assert measure(now) == []


def test_page_and_rest_show_racks_and_the_page_is_the_same_without_any(lab: Lab) -> None:
    mira = person("mira")
    assert "h-inlets" not in signed_in(mira).get("/racks").content.decode()
    now = timezone.now()
    for hours in range(12):
        report(lab, now - timedelta(hours=hours), WARM, measured=True)
        measure(now - timedelta(hours=hours))
    report(lab, now, WARM, measured=True)
    measure(now)
    page = signed_in(mira).get("/racks").content.decode()
    assert "24.5&nbsp;°C" in page
    assert "estimate</span>" not in page
    assert page.count("<polyline") == 4
    assert "Over a day" not in page, "twelve hours are no pattern of days"
    items = bearer(mira, "read").get("/api/v1/racks/temperatures").json()["items"]
    assert [(item["rack"], item["inlet_c"], item["is_estimate"]) for item in items] == [
        ("A", 21.0, False), ("B", 24.5, False), ("C", 22.0, False), ("D", 21.0, False),
    ]  # fmt: skip
    assert len(items[1]["hours"]) == 12
    assert {hour["is_estimate"] for item in items for hour in item["hours"]} == {False}


def store(rack: str, now: datetime, hours: int, celsius: Callable[[datetime], float], **more: Any) -> None:
    """Store the mean temperatures of the last whole hours."""
    newest = now.replace(minute=0, second=0, microsecond=0)
    moments = [newest - timedelta(hours=ago) for ago in range(1, hours + 1)]
    RackTemperature.objects.bulk_create(
        RackTemperature(rack=rack, hour=at, sum_c=2 * celsius(at), count=2, **{"nodes": 3, "is_estimate": False} | more)
        for at in moments
    )


def test_the_page_shows_when_racks_are_warm_over_the_day_and_by_what(lab: Lab) -> None:
    now = timezone.now()

    def swinging(at: datetime) -> float:
        return 21 + (1.5 if timezone.localtime(at).hour == 15 else -1.0 if timezone.localtime(at).hour == 4 else 0)

    store("A", now, 5 * 24, swinging, is_estimate=True)
    store("B", now, 30, lambda at: 35.0)
    page = signed_in(person("mira")).get("/racks").content.decode()
    assert "Over a day the racks are coolest at 04:00 and warmest at 15:00, 2.5 °C apart" in page
    assert "on average of 5 days by estimates." in page
    assert page.count("estimate</span>") == 1 + 2, "the line of rack A and its bands, not those of rack B"


def test_outer_bands_are_joined_and_the_warmest_is_there(lab: Lab) -> None:
    now = timezone.now()
    store("A", now, 40 * 24, lambda at: 10.0 + 2 * (int(at.timestamp()) // 3600 % 20))
    bands = failures_by_inlet(now)
    assert len(bands) == 12
    assert (bands[0].low_c, bands[-1].high_c) == (10, 50)
    assert [band.high_c for band in bands[:-1]] == [band.low_c for band in bands[1:]]
    assert sum(band.rate.node_days for band in bands) == pytest.approx(40 * 3)


def test_of_very_many_failures_the_newest_count_and_the_node_days_since_then(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temperatures, "MAX_FAILURES", 4)
    now = timezone.now()
    store("A", now, 240, lambda at: 21.0)
    project, hour = a_project(), now.replace(minute=0, second=0, microsecond=0)
    for number in range(10):
        at = hour - timedelta(hours=24 * number) - timedelta(minutes=30)
        Failure.objects.create(
            at=at, day=at.date(), project=project, node=NAMES[0], cause="gpu.ecc", program="p", is_interruption=True,
            lost_node_s=0, lost_gpu_s=0,
        )  # fmt: skip
    (band,) = failures_by_inlet(now)
    assert band.rate.failures == 4
    assert band.rate.node_days == pytest.approx(4 * 3), "four days, not ten"


def test_failures_are_counted_by_the_temperature_at_that_time(lab: Lab, settings: Any) -> None:
    now = timezone.now()
    hour = now.replace(minute=0, second=0, microsecond=0)
    for rack, celsius in (("A", 21.0), ("B", 27.0)):
        RackTemperature.objects.bulk_create(
            RackTemperature(
                rack=rack, hour=hour - timedelta(hours=ago), sum_c=celsius, count=1, nodes=3, is_estimate=False
            )
            for ago in range(1, 241)
        )
    store("C", now, 240, lambda at: 27.0, is_estimate=True)
    project = a_project()
    for number, node in enumerate(["dgx-01", *["dgx-02"] * 8, "dgx-04", *["dgx-03"] * 3]):
        at = hour - timedelta(hours=5 + number) + timedelta(minutes=30)
        Failure.objects.create(
            at=at, day=at.date(), project=project, node=node, cause="gpu.ecc", program="p", is_interruption=True,
            lost_node_s=0, lost_gpu_s=0,
        )  # fmt: skip
    cold, warm, estimated = failures_by_inlet(now)
    assert (cold.low_c, cold.rate.failures, cold.rate.node_days) == (20, 1, 30)
    assert (warm.low_c, warm.rate.failures, warm.rate.node_days) == (26, 8, 30)
    assert warm.rate.per_thousand_interval is not None
    assert (cold.is_estimate, warm.is_estimate) == (False, False)
    assert (estimated.low_c, estimated.is_estimate, estimated.rate.failures) == (26, True, 3)
    page = signed_in(sysadmin("ops")).get("/racks").content.decode()
    assert "too few failures to say" in page
    assert "267 (115 to 525)" in page
    settings.VIGIL_QUEUE_VISIBLE = "own"
    assert "too few" not in signed_in(person("mira")).get("/racks").content.decode(), "failures of others' projects"
