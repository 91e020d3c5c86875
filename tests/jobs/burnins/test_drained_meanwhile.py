"""What drains a node during a burn-in does not end the burn-in's verdict, nor what a person had drained before."""

from __future__ import annotations

import pytest

from jobs.burnins import returning
from jobs.burnins.start import cancel
from nodes.models import NodeOrder, SiteRule
from tests.jobs.burnins.simulated_cluster import SimulatedCluster, away, good_lines, line
from tests.nodes.drains.windows import at, planned

pytestmark = pytest.mark.django_db

FAILURE = "[node] GPU 1, memory: 12 words differ (1 of 2 times) (vigil: burn-in)"
RULE = """
[[rule]]
name = "pending-rows"
title = "Rows wait to be remapped"
source = "Example"
severity = "warning"
action = "drain"
signal = "gpu_counters"
where = { remapped_pending = "> 0" }
clears = "recovered"
"""


def report_pending_rows(cluster: SimulatedCluster, number: int) -> None:
    cluster.lab.happens("gpu.counters", gpu=cluster.lab.machine().gpus[0], remapped_pending=number)
    cluster.lab.step()


def end_tests(cluster: SimulatedCluster, *, fails: bool) -> None:
    *lines, end = good_lines()
    failure = [line("memory", "GPU 1", outcome="failed", detail="12 words differ")] if fails else []
    cluster.write([*lines, *failure, end])
    cluster.end_job()
    cluster.until_ended()


@pytest.fixture
def rule(db: None) -> SiteRule:
    return SiteRule.objects.create(name="pending-rows", toml=RULE)


def test_a_rule_that_recovers_does_not_return_a_node_that_failed(cluster: SimulatedCluster, rule: SiteRule) -> None:
    cluster.start()
    cluster.until_running()
    report_pending_rows(cluster, 1)
    assert cluster.lab.scheduler.drained["dgx-01"].endswith("(vigil: pending-rows)")
    end_tests(cluster, fails=True)
    report_pending_rows(cluster, 0)
    cluster.lab.step()
    assert cluster.lab.entry(rule.name).state == "cleared"
    assert cluster.lab.scheduler.drained["dgx-01"].endswith("(vigil: burn-in)")
    assert cluster.row().outcome == "Drained."


def test_a_node_that_failed_by_a_rule_alone_returns_with_it(cluster: SimulatedCluster, rule: SiteRule) -> None:
    cluster.start()
    cluster.until_running()
    report_pending_rows(cluster, 1)
    end_tests(cluster, fails=False)
    assert cluster.row().verdict == "failed"
    assert cluster.lab.scheduler.drained["dgx-01"].endswith("(vigil: pending-rows)")
    report_pending_rows(cluster, 0)
    cluster.lab.step()
    assert not cluster.lab.scheduler.drained


def test_a_node_that_died_does_not_return_with_a_rule(cluster: SimulatedCluster, rule: SiteRule) -> None:
    cluster.start()
    cluster.until_running()
    report_pending_rows(cluster, 1)
    cluster.end_job("node_fail")
    cluster.until_ended()
    report_pending_rows(cluster, 0)
    cluster.lab.step()
    assert cluster.lab.scheduler.drained["dgx-01"].endswith("(vigil: burn-in)")


def test_a_drain_that_a_rule_replaced_before_it_was_carried_out_is_ordered_again(
    cluster: SimulatedCluster, rule: SiteRule
) -> None:
    cluster.start()
    cluster.until_running()
    *lines, end = good_lines()
    cluster.write([*lines, line("memory", "GPU 1", outcome="failed", detail="12 words differ"), end])
    cluster.end_job()
    cluster.lab.scheduler.broken_parts = {"drain": away()}
    cluster.until(lambda _: NodeOrder.objects.open().exists())
    cluster.lab.scheduler.broken_parts = {}
    report_pending_rows(cluster, 1)
    assert cluster.lab.scheduler.drained["dgx-01"].endswith("(vigil: pending-rows)")
    cluster.tick(2)
    assert cluster.burn_in.state == "returning"
    assert cluster.burn_in.detail == "dgx-01 is drained for another reason. Replaced by a later order."
    NodeOrder.objects.update(ended_at=NodeOrder.objects.earliest("pk").asked_at - returning.ORDER_RETRY_AFTER)
    cluster.until_ended()
    assert cluster.lab.scheduler.drained == {"dgx-01": FAILURE}


def test_the_end_of_maintenance_does_not_return_a_node_that_failed(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    planned(cluster.user, "dgx-01")
    at(cluster.lab)
    assert "(vigil: maintenance-" in cluster.lab.scheduler.drained["dgx-01"]
    end_tests(cluster, fails=True)
    assert cluster.lab.scheduler.drained == {"dgx-01": FAILURE}
    at(cluster.lab, 61)
    assert cluster.lab.scheduler.drained == {"dgx-01": FAILURE}


def test_maintenance_that_drained_a_node_just_before_its_verdict(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    planned(cluster.user, "dgx-01")
    cluster.lab.scheduler.meanwhile = lambda: at(cluster.lab)
    end_tests(cluster, fails=True)
    at(cluster.lab, 61)
    assert cluster.lab.scheduler.drained == {"dgx-01": FAILURE}


def test_a_node_that_passed_returns_at_the_end_of_maintenance(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    window = planned(cluster.user, "dgx-01")
    at(cluster.lab)
    end_tests(cluster, fails=False)
    reason = f"[node] new switch (vigil: {window.requester})"
    assert (cluster.row().verdict, cluster.row().outcome) == ("passed", f"Drained: {reason}")
    assert cluster.lab.scheduler.drained["dgx-01"] == reason
    at(cluster.lab, 61)
    assert not cluster.lab.scheduler.drained


def test_the_end_of_maintenance_does_not_return_what_a_person_had_drained_before(cluster: SimulatedCluster) -> None:
    cluster.lab.scheduler.drain("dgx-01", "fan 3")
    cluster.read_nodes()
    cluster.start(may_undrain=True)
    cluster.until_running()
    planned(cluster.user, "dgx-01")
    at(cluster.lab)
    cancel(cluster.user, cluster.burn_in)
    cluster.end_job("cancelled")
    cluster.until_ended()
    at(cluster.lab, 61)
    assert cluster.lab.scheduler.drained["dgx-01"].endswith("before: fan 3 (vigil: burn-in)")


def test_a_rule_that_recovers_does_not_return_what_a_person_had_drained_before(
    cluster: SimulatedCluster, rule: SiteRule
) -> None:
    cluster.lab.scheduler.drain("dgx-01", "fan 3")
    cluster.read_nodes()
    cluster.start(may_undrain=True)
    cluster.until_running()
    report_pending_rows(cluster, 1)
    cancel(cluster.user, cluster.burn_in)
    cluster.end_job("cancelled")
    cluster.until_ended()
    report_pending_rows(cluster, 0)
    cluster.lab.step()
    assert cluster.lab.scheduler.drained["dgx-01"].endswith("(vigil: burn-in)")


def test_a_persons_drain_stands(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    cluster.lab.scheduler.drain("dgx-01", "waits for a part")
    cluster.read_nodes()
    end_tests(cluster, fails=True)
    assert cluster.lab.scheduler.drained == {"dgx-01": "waits for a part"}


@pytest.mark.parametrize("is_carried_out", [True, False])
def test_cancelled_while_nobody_knows_whether_the_node_was_undrained(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch, is_carried_out: bool
) -> None:
    cluster.lab.xid(79)
    cluster.lab.step()
    before = cluster.lab.scheduler.drained["dgx-01"]
    undrain = cluster.lab.scheduler.undrain

    def lose_answer(node: str) -> None:
        if is_carried_out:
            undrain(node)
        raise away()

    monkeypatch.setattr(cluster.lab.scheduler, "undrain", lose_answer)
    cluster.start()
    cluster.until(lambda burn_in: burn_in.state == "starting")
    cluster.tick(2)
    assert NodeOrder.objects.open().get().tried_at is not None
    cancel(cluster.user, cluster.burn_in)
    cluster.until_ended()
    if is_carried_out:
        assert cluster.lab.scheduler.drained["dgx-01"].startswith("[node] no result of burn-in")
        assert cluster.row().outcome == "Drained."
    else:
        assert cluster.lab.scheduler.drained["dgx-01"] == before
        assert cluster.row().outcome.startswith("Drained: [node] Xid 79")
