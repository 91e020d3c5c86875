"""A rule is tried on what is stored: the entries, what would have followed, and what cannot be known."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from nodes.health.rules.catalogue import shipped_rules
from nodes.health.rules.rule import Rule, parse_rules
from nodes.models import Agent, GpuPlace
from nodes.monitoring.dry_run import run as module
from nodes.monitoring.dry_run.run import RuleDryRun, dry_run
from tests.nodes.monitoring.dry_run.history import NOW, StoredCluster

pytestmark = pytest.mark.django_db

DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)
HEAT = """
[[rule]]
name = "heat"
title = "Hot"
source = "a test"
severity = "warning"
action = "watch"
signal = "gpu_samples"
where = { margin_c = "<= 3" }
for = "5m"
clears = "recovered"
clears_after = "10m"
clears_where = { margin_c = "> 5" }
"""


@pytest.fixture
def cluster() -> StoredCluster:
    return StoredCluster()


def rule_of(text: str) -> Rule:
    (rule,) = parse_rules(text)
    return rule


def tried(rule: Rule | str, **options: Any) -> RuleDryRun:
    return dry_run(rule_of(rule) if isinstance(rule, str) else rule, now=NOW, **options)


def test_an_xid_opens_once_and_names_gpu_and_jobs(cluster: StoredCluster) -> None:
    cluster.xid(79, 1, ago=3 * DAY, text="GPU has fallen off the bus.")
    cluster.xid(79, 1, ago=2 * DAY)
    cluster.xid(31, 2, ago=DAY)
    cluster.xid(79, 2, ago=40 * DAY)
    cluster.job(4711, 1, 4 * DAY, 2 * DAY)
    cluster.job(4712, 1, 4 * DAY, 2 * DAY, gpu=1)
    found = tried(shipped_rules()["off-bus"])
    (entry,) = found.entries
    assert (entry.node, entry.gpu, entry.opened_at, entry.cleared_at) == ("dgx-02", 0, NOW - 3 * DAY, None)
    assert (entry.action, entry.count, entry.jobs, entry.outcome) == ("drain", 2, ["4711"], "held_back")
    assert entry.observed["code"] == 79
    assert "20 %" in entry.held_back, "one of three nodes is more than a fifth of the partition"
    assert (found.nodes, found.nodes_read, found.untried, found.cut) == (3, 3, [], "")


def test_a_quiet_rule_opens_again_after_it_cleared(cluster: StoredCluster) -> None:
    for ago in (9 * DAY, 9 * DAY - HOUR, 3 * DAY):
        cluster.xid(31, 0, ago=ago, text=str(ago))
    first, second = tried(shipped_rules()["program-error"]).entries
    assert (first.opened_at, first.cleared_at) == (NOW - 9 * DAY, NOW - 8 * DAY + HOUR)
    assert (first.count, second.count) == (2, 1)
    assert (second.cleared_at, second.outcome) == (NOW - 2 * DAY, "none")


def test_different_people_are_distinguished_by_the_allocations_of_the_time(cluster: StoredCluster) -> None:
    for number, user in enumerate(("ada", "ben", "cleo")):
        cluster.job(number, 0, (6 - number) * DAY, 12 * HOUR, user=user, name=f"{user}.py")
        cluster.xid(13, 0, ago=(6 - number) * DAY - HOUR, text="abc"[number])
    (entry,) = tried(shipped_rules()["errors-follow-gpu"]).entries
    assert entry.opened_at == NOW - 4 * DAY + HOUR


def test_a_row_that_counts_many_events_is_spread_over_its_time(cluster: StoredCluster) -> None:
    rule = rule_of("""
[[rule]]
name = "many"
title = "Many"
source = "a test"
severity = "warning"
action = "watch"
signal = "xid"
where = { code = 63 }
count = 100
within = "1h"
clears = "person"
""")
    row = cluster.xid(63, 0, ago=2 * DAY, count=200, last_at=NOW - DAY)
    assert tried(rule).found == 0, "eight an hour"
    row.last_at = row.at + 2 * HOUR
    row.save()
    assert tried(rule).found == 1, "a hundred an hour"


def test_repairs_clear_and_a_new_event_opens_again(cluster: StoredCluster) -> None:
    cluster.xid(109, 0, ago=5 * DAY)
    cluster.event("driver.reloaded", 0, 4 * DAY, gpu=None)
    cluster.xid(109, 0, ago=2 * DAY, text="again")
    first, second = tried(shipped_rules()["context-switch-timeout"]).entries
    assert (first.cleared_at, second.cleared_at) == (NOW - 4 * DAY, None)


def test_lasting_events_are_states_with_a_duration(cluster: StoredCluster) -> None:
    cluster.event("gpu.silent", 0, 3 * HOUR, gpu=None, last_at=NOW - 3 * HOUR + 90 * MINUTE)
    cluster.event("gpu.silent", 1, 3 * HOUR, gpu=None, last_at=NOW - 3 * HOUR + timedelta(seconds=50))
    (entry,) = tried(shipped_rules()["nvml-hung"]).entries
    assert entry.node == "dgx-01"
    assert entry.opened_at == NOW - 3 * HOUR + MINUTE
    assert entry.cleared_at == NOW - 3 * HOUR + 95 * MINUTE
    cluster.event("gpu.lost", 2, HOUR, gpu=1, is_open=True)
    (entry,) = tried(shipped_rules()["off-bus"]).entries
    assert (entry.node, entry.gpu, entry.opened_at) == ("dgx-03", 1, NOW - HOUR + timedelta(seconds=20))


def test_a_mount_that_hangs_everywhere_is_the_servers_fault(cluster: StoredCluster) -> None:
    facts = {"mounts": [{"mount": "/data", "source": "nfs:/data"}]}
    Agent.objects.update(facts=facts)
    for node in range(3):
        about = {"mount": "/data", "source": "nfs:/data"}
        cluster.event("mount.slow", node, 5 * HOUR, gpu=None, data=about, last_at=NOW - 4 * HOUR)
    assert tried(shipped_rules()["mount-hung"]).found == 0
    assert tried(shipped_rules()["file-system-slow"]).found == 3
    cluster.event(
        "mount.slow", 1, 2 * HOUR, gpu=None, data={"mount": "/data", "source": "nfs:/data"}, last_at=NOW - HOUR
    )
    (entry,) = tried(shipped_rules()["mount-hung"]).entries
    assert (entry.node, entry.item, entry.opened_at) == ("dgx-02", "/data", NOW - 2 * HOUR + 6 * MINUTE)


def test_a_gpu_that_vanished_is_lost_until_it_is_back(cluster: StoredCluster) -> None:
    """Its event closes as soon as the node's facts do not list it, and others take its index."""
    gone = NOW - 3 * HOUR
    data = {"reason": "vanished"}
    cluster.event("gpu.lost", 0, 3 * HOUR, data=data, last_at=gone + timedelta(seconds=5))
    cluster.event("gpu.lost", 1, 3 * HOUR, data=data, last_at=gone + timedelta(seconds=5))
    for node, index, since in ((0, 0, gone - DAY), (0, 1, gone - DAY), (0, 1, gone), (1, 0, gone - DAY)):
        gpu = cluster.gpus[node][index]
        place = {"gpu": gpu, "agent": gpu.agent, "index": 0, "since": since}
        GpuPlace.objects.create(**place, until=gone if since < gone else None)
    back = cluster.gpus[1][0]
    GpuPlace.objects.create(gpu=back, agent=back.agent, index=0, since=gone + timedelta(seconds=15))
    (entry,) = tried(shipped_rules()["off-bus"]).entries
    assert (entry.node, entry.gpu, entry.opened_at) == ("dgx-01", 0, gone + timedelta(seconds=20))


def test_links_that_go_down_have_a_history(cluster: StoredCluster) -> None:
    for ago in (3, 2, 1):
        cluster.event("link.down", 0, ago * MINUTE, gpu=None, data={"port": "mlx5_0/1"})
    found = tried(shipped_rules()["port-flapping"])
    assert (found.untried, [(entry.node, entry.item) for entry in found.entries]) == ([], [("dgx-01", "mlx5_0/1")])


def test_only_the_newest_clean_up_must_follow_another_xid(cluster: StoredCluster) -> None:
    rule = (
        HEAT[: HEAT.index("signal")]
        + """signal = "xid"
where = { code = 45, is_echo = false }
clears = "person"
"""
    )
    cluster.xid(13, ago=DAY)
    row = cluster.xid(45, ago=DAY)
    assert tried(rule).found == 0
    row.count, row.last_at = 5, NOW - DAY + HOUR
    row.save()
    assert tried(rule).found == 1


def test_temperatures_of_seconds_open_and_clear(cluster: StoredCluster) -> None:
    cluster.seconds("temperature_c", [60.0] * 600 + [85.0] * 1200 + [70.0] * 1800, 2 * HOUR)
    (entry,) = tried(HEAT).entries
    assert (entry.node, entry.gpu) == ("dgx-01", 0)
    opened = NOW - 2 * HOUR + 15 * MINUTE
    assert timedelta() <= entry.opened_at - opened <= timedelta(seconds=20)
    assert entry.cleared_at is not None
    assert timedelta() <= entry.cleared_at - (NOW - 2 * HOUR + 40 * MINUTE) <= timedelta(seconds=20)
    assert entry.observed["margin_c"] == 2


@pytest.mark.parametrize(("silent_s", "found"), [(100, 1), (200, 0)])
def test_what_nobody_read_does_not_count(cluster: StoredCluster, silent_s: int, found: int) -> None:
    cluster.seconds("temperature_c", [85.0] * 200, HOUR)
    cluster.seconds("temperature_c", [85.0] * 200, HOUR - timedelta(seconds=200 + silent_s))
    assert tried(HEAT).found == found


def test_a_minute_holds_only_if_its_lowest_and_highest_value_do(cluster: StoredCluster) -> None:
    hot, mixed = [85.0] * 10, [85.0, 60.0] * 5
    cluster.minutes("temperature_c", hot + [60.0] * 20, hot + [60.0] * 20, 10 * DAY)
    cluster.minutes("temperature_c", mixed, [86.0] * 10, 10 * DAY, node=1)
    (entry,) = tried(HEAT).entries
    assert entry.node == "dgx-01"
    at_any_moment = HEAT.replace('for = "5m"', "")
    assert {entry.node for entry in tried(at_any_moment).entries} == {"dgx-01", "dgx-02"}, "a peak counts"


def test_bits_of_a_minute_are_never_averaged(cluster: StoredCluster) -> None:
    cluster.minutes("throttle", [0.0] * 30, [64.0] * 30, 10 * DAY)
    assert tried(shipped_rules()["thermal-slowdown"]).found == 0, "now and then, never for a whole minute"
    cluster.minutes("throttle", [32.0] * 30, [64.0] * 30, 12 * DAY, node=1)
    (entry,) = tried(shipped_rules()["thermal-slowdown"]).entries
    assert entry.node == "dgx-02"


def test_host_values_and_ports(cluster: StoredCluster) -> None:
    host = {"disk_total_mib:/": 10_000, "ib_up:mlx5_0": 1}
    Agent.objects.update(newest={"host": host})
    cluster.minutes("disk_used_mib:/", [9_800.0] * 30, [9_900.0] * 30, 5 * DAY, gpu=None)
    cluster.minutes(
        "ib_up:mlx5_0", [1.0] * 5 + [0.0] * 5 + [1.0] * 20, [1.0] * 5 + [0.0] * 5 + [1.0] * 20, 5 * DAY, gpu=None
    )
    (entry,) = tried(shipped_rules()["root-disk-full"]).entries
    assert (entry.node, entry.outcome) == ("dgx-01", "held_back")
    (entry,) = tried(shipped_rules()["port-down"]).entries
    assert (entry.node, entry.item) == ("dgx-01", "mlx5_0")
    assert entry.cleared_at is not None


def test_missing_history_is_reported(cluster: StoredCluster) -> None:
    found = tried(shipped_rules()["clock-wrong"])
    assert found.untried == [
        "No history of clock_offset_s (host) is stored: it can only be tried on the rule's examples."
    ]
    assert found.nodes == 0
    cluster.xid(48, 0, ago=DAY)
    found = tried(shipped_rules()["uncorrectable-memory-error"])
    assert found.found == 1
    assert "signal gpu_counters" in found.untried[0]


def test_drains_stay_within_limits_and_the_breaker_stops_them() -> None:
    cluster = StoredCluster(nodes=30)
    cluster.xid(79, 0, ago=9 * DAY)
    cluster.xid(79, 1, ago=9 * DAY - MINUTE)
    cluster.xid(79, 2, ago=5 * DAY)
    found = tried(shipped_rules()["off-bus"])
    assert [entry.outcome for entry in found.entries] == ["drained", "held_back", "drained"]
    assert found.entries[1].held_back == "Vigil has drained 1 of at most 1 nodes in the last hour."
    assert (found.nodes_drained, found.tripped_at) == (2, None)
    for node in range(3, 8):
        cluster.xid(79, node, ago=DAY)
    cluster.xid(79, 9, ago=HOUR)
    found = tried(shipped_rules()["off-bus"])
    assert found.tripped_at == NOW - DAY
    assert found.outcomes == {"drained": 2, "held_back": 7}
    assert "breaker" in found.entries[-1].held_back


def test_the_results_of_a_rule_that_fires_on_everything_are_visibly_cut(
    cluster: StoredCluster, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "MAX_FOUND", 50)
    monkeypatch.setattr(module, "MAX_LISTED", 10)
    flapping = [85.0] * 10 + [60.0] * 10
    cluster.seconds("temperature_c", flapping * 200, 40 * HOUR)
    anything = HEAT.replace('for = "5m"', "").replace('clears_after = "10m"', "")
    found = tried(anything)
    assert (found.found, len(found.entries)) == (50, 10)
    assert found.cut == "Stopped after 50 findings: the rule opens far too often. 0 of 3 nodes were read."


def test_time_and_rows_are_bounded(cluster: StoredCluster, monkeypatch: Any) -> None:
    cluster.xid(79, 0, ago=DAY)
    assert "0 of 3 nodes were read" in tried(shipped_rules()["off-bus"], budget_s=-1.0).cut
    monkeypatch.setattr(module, "MAX_EVENTS", 1)
    cluster.xid(79, 0, ago=HOUR, text="again")
    assert tried(shipped_rules()["off-bus"]).cut.startswith("Stopped after 1 events")
