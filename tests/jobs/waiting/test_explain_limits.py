"""Test the explanation of why a job waits: licenses, a QOS and reservations."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.spec import JobSpec
from nodes.schedulers.cluster import AssociationInfo, LicenseInfo, PartitionInfo, QosInfo, ReservationInfo
from tests.jobs.submissions import spec_of
from tests.jobs.waiting.queues import NOW, cluster, node, plain, queued, texts, why


def licensed(licenses: str, **facts: Any) -> JobSpec:
    return spec_of(resources={"licenses": licenses, **facts})


@pytest.mark.parametrize(
    ("licenses", "there", "text", "never"),
    [
        ("matlab", LicenseInfo(name="matlab", total=2, used=2), "matlab: 2 of 2 in use; this job requests 1.", False),
        ("matlab:2", LicenseInfo(name="matlab", total=3, used=1, reserved=1),
         "matlab: 1 of 3 in use, 1 reserved; this job requests 2.", False),
        ("matlab:3", LicenseInfo(name="matlab", total=2),
         "matlab: there are 2 in all; this job requests 3. It can never start as requested.", True),
        ("abaqus", LicenseInfo(name="matlab", total=2),
         "abaqus: the scheduler has no such license; this job requests 1. It can never start as requested.", True),
        ("matlab", LicenseInfo(name="matlab", total=2, used=1),
         "matlab: 1 of 2 in use; this job requests 1. Licenses is Slurm's reason; usage may have changed since.",
         False),
    ],
)  # fmt: skip
def test_licenses_are_named_with_their_numbers(licenses: str, there: LicenseInfo, text: str, never: bool) -> None:
    found = why(licensed(licenses), cluster(node("a"), licenses=(there,)), "Licenses")
    assert texts(found) == [text]
    assert (found.blocks[0].kind, found.blocks[0].is_reason, found.never) == ("limit", True, never)
    assert found.variants == ()


def test_licenses_that_nobody_has_listed_are_the_schedulers_word() -> None:
    assert texts(why(licensed("matlab"), cluster(node("a")), "Licenses")) == ["Licenses: its licenses are in use."]


def test_short_licenses_are_in_the_way_whatever_else_is() -> None:
    short = LicenseInfo(name="matlab", total=2, used=2)
    found = why(licensed("matlab"), cluster(node("a"), licenses=(short,)), "Priority", scheduler_id="")
    assert "matlab: 2 of 2 in use; this job requests 1." in texts(found)
    assert found.starts_on == ()


def test_licenses_that_those_ahead_take_are_not_promised() -> None:
    matlab = LicenseInfo(name="matlab", total=2, used=1)
    ahead = queued("5", reason="Priority", priority=9, licenses="matlab:1")
    draft = {"reason": "", "scheduler_id": ""}
    spec = licensed("matlab", partition="gpu")
    alone = why(spec, cluster(node("a"), licenses=(matlab,)), **draft)
    assert alone.starts_on == ("a",)
    behind = why(spec, cluster(node("a"), licenses=(matlab,), queue=(ahead,)), **draft)
    assert behind.starts_on == ()
    assert behind.blocks


def test_the_schedulers_licenses_count_more_than_the_specifications() -> None:
    there = (LicenseInfo(name="matlab", total=2, used=2),)
    queued_job = queued("77", reason="Licenses", licenses="matlab:2")
    found = why(licensed("matlab:1"), cluster(node("a"), licenses=there, queue=(queued_job,)), "Licenses")
    assert texts(found) == ["matlab: 2 of 2 in use; this job requests 2."]


def test_a_qos_may_set_the_partitions_limit_aside() -> None:
    short = (PartitionInfo(name="gpu", is_default=True, max_time_s=3600, max_nodes=1),)
    where = cluster(
        node("a"), node("b"), partitions=short, qos=(QosInfo(name="long", flags=("PARTITION_TIME_LIMIT",)),)
    )
    spec = spec_of(resources={"nodes": 2, "gpus_per_node": 8, "time_limit": "12:00:00", "qos": "long"},
                   run={"global_batch": 32})  # fmt: skip
    assert [block.name for block in why(spec, where).blocks] == ["PartitionNodeLimit"]


@pytest.mark.parametrize(
    ("reservation", "kind", "text", "never"),
    [
        ({"ends_at": NOW + 3600}, "time", "Reservation r ends in 1 h; this job requests 12 h.", True),
        (
            {"starts_at": NOW + 60, "ends_at": NOW + 3660},
            "time",
            "Reservation r has 1 h for this; this job requests",
            True,
        ),
        ({"ends_at": NOW + 3600, "flags": ("DAILY",)}, "", "", False),
        ({"ends_at": NOW + 3600, "flags": ("FLEX",)}, "", "", False),
        ({"ends_at": NOW + 90_000, "users": ("mira",)}, "reservation", "Reservation r is for others.", True),
        ({"ends_at": NOW + 90_000, "accounts": ("lab",)}, "", "", False),  # one of the accounts above
    ],
)
def test_a_reservation_that_will_not_do(reservation: dict[str, Any], kind: str, text: str, never: bool) -> None:
    accounts = (AssociationInfo(account="lab"), AssociationInfo(account="vision", parent="lab"))
    where = cluster(
        node("a"), associations=accounts, reservations=(ReservationInfo(name="r", nodes=("a",), **reservation),)
    )
    options = {"gpus_per_node": 8, "time_limit": "12:00:00", "reservation": "r"}
    found = why(spec_of(resources=options, run={"global_batch": 32}), where, "Reservation")
    reports = [block for block in found.blocks if block.kind == kind and text in plain(block.text)]
    assert bool(reports) is bool(text)
    assert found.never is never
