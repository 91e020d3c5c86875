"""A finding from before the tests fails the node if its fault shows again, and is a passed burn-in's to end if not."""

from __future__ import annotations

from typing import Any

import pytest

from nodes.remediation import inbox
from tests.jobs.burnins.simulated_cluster import SimulatedCluster, good_lines

pytestmark = pytest.mark.django_db

REMAP_FAILED = "A faulty memory row could not be remapped"


def report(cluster: SimulatedCluster, **counters: Any) -> None:
    machine = cluster.lab.machine()
    cluster.lab.happens("gpu.counters", gpu=machine.gpus[0], **counters)


def xid(cluster: SimulatedCluster, code: int) -> None:
    cluster.lab.xid(code)
    cluster.lab.step()


def end_tests(cluster: SimulatedCluster) -> None:
    cluster.write(good_lines())
    cluster.end_job()
    cluster.until_ended()


def test_an_xid_that_comes_again_during_the_tests_fails_the_node(cluster: SimulatedCluster) -> None:
    xid(cluster, 79)
    cluster.start()
    cluster.until_running()
    xid(cluster, 79)
    end_tests(cluster)
    assert cluster.row().verdict == "failed"
    assert cluster.texts() == ["GPU fell off the bus again during the burn-in (health rule off-bus)."]
    assert cluster.lab.scheduler.drained == {
        "dgx-01": "[node] GPU fell off the bus again during the burn-in (health rule off-bus) (vigil: burn-in)"
    }
    assert cluster.lab.entry("off-bus").state == "open"


def test_a_state_that_lasts_through_the_tests_fails_the_node(cluster: SimulatedCluster) -> None:
    report(cluster, remapped_failed=1)
    cluster.lab.step()
    assert cluster.lab.scheduler.drained
    cluster.start()
    cluster.until_running()
    cluster.lab.step()
    entry = cluster.lab.entry("row-remap-failed")
    assert entry.last_seen < cluster.burn_in.tests_began_at, "the row of a state that lasts is written once a minute"
    end_tests(cluster)
    assert (cluster.row().verdict, cluster.texts()[0]) == (
        "failed", f"{REMAP_FAILED} again during the burn-in (health rule row-remap-failed).",
    )  # fmt: skip
    assert list(cluster.lab.scheduler.drained) == ["dgx-01"]


def test_evidence_between_the_verdict_and_the_return_fails_the_node(cluster: SimulatedCluster) -> None:
    xid(cluster, 79)
    cluster.start()
    cluster.until_running()
    cluster.write(good_lines())
    cluster.end_job()
    cluster.until(lambda burn_in: burn_in.state == "returning")
    assert cluster.row().verdict == "passed"
    xid(cluster, 79)
    cluster.until_ended()
    assert (cluster.row().verdict, cluster.row().outcome) == ("failed", "Drained.")
    assert cluster.lab.entry("off-bus").state == "open"


def test_what_only_a_person_ends_gives_no_verdict_while_it_is_open(cluster: SimulatedCluster) -> None:
    xid(cluster, 64)
    cluster.start()
    cluster.until_running()
    end_tests(cluster)
    assert cluster.row().verdict == "inconclusive"
    assert cluster.texts() == [
        f"{REMAP_FAILED} (health rule row-remap-failed) is still open. Clear it once it is repaired."
    ]
    assert cluster.lab.scheduler.drained["dgx-01"].startswith("[node] no result of burn-in")
    assert cluster.lab.entry("row-remap-failed").state == "open"
    cluster.start()
    cluster.until_running()
    inbox.clear(cluster.user, cluster.lab.entry("row-remap-failed").pk, "board replaced")
    end_tests(cluster)
    assert (cluster.row().verdict, cluster.lab.scheduler.drained) == ("passed", {})


def test_a_node_in_service_with_a_finding_that_only_a_person_ends_stays_there(
    cluster: SimulatedCluster, settings: Any
) -> None:
    settings.VIGIL_HEALTH = "propose"
    xid(cluster, 64)
    cluster.start()
    cluster.until_running()
    end_tests(cluster)
    assert (cluster.row().verdict, cluster.row().outcome) == ("inconclusive", "In service.")


def test_a_dismissed_finding_does_not_count(cluster: SimulatedCluster, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    xid(cluster, 64)
    inbox.dismiss(cluster.user, cluster.lab.entry("row-remap-failed").pk, "a known false alarm")
    cluster.start()
    cluster.until_running()
    xid(cluster, 64)
    end_tests(cluster)
    assert (cluster.row().verdict, cluster.lab.entry("row-remap-failed").state) == ("passed", "dismissed")


def test_a_finding_that_waits_for_a_reset_ends_if_its_fault_no_longer_shows(cluster: SimulatedCluster) -> None:
    xid(cluster, 62)
    assert cluster.lab.scheduler.drained
    cluster.start()
    cluster.until_running()
    end_tests(cluster)
    assert (cluster.row().verdict, cluster.lab.scheduler.drained) == ("passed", {})
    assert cluster.lab.entry("microcontroller-halt").state == "cleared"
    xid(cluster, 62)
    assert list(cluster.lab.scheduler.drained) == ["dgx-01"], "the next failure is a finding of its own"


def test_a_state_that_is_good_again_is_no_obstacle(cluster: SimulatedCluster) -> None:
    report(cluster, ecc_uncorrected=1)
    cluster.lab.step()
    assert cluster.lab.scheduler.drained
    report(cluster, ecc_uncorrected=0)
    cluster.lab.step()
    cluster.start()
    cluster.until_running()
    end_tests(cluster)
    assert (cluster.row().verdict, cluster.lab.scheduler.drained) == ("passed", {})
    assert cluster.lab.entry("uncorrectable-memory-error").state == "cleared"
