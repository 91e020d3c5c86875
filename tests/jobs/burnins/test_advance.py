"""A burn-in goes from the request to a node in service or drained, through every fault on its way."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.burnins.start import NeedsAgreement, cancel
from jobs.errors import Conflict
from jobs.tasks import assess
from nodes.models import BurnIn, GoldenRecord, Node, NodeOrder
from nodes.remediation import inbox
from nodes.schedulers.base import SchedulerError
from portal.models import AuditEntry
from tests.jobs.burnins.simulated_cluster import BAD, H100, SimulatedCluster, away, good_lines, line
from tests.jobs.reliability.lab import count, ran
from tests.lab import signed_in

pytestmark = pytest.mark.django_db


def pass_burn_in(cluster: SimulatedCluster) -> None:
    cluster.until_running()
    cluster.write(good_lines())
    cluster.end_job()
    cluster.until_ended()


def drain_by_rule(cluster: SimulatedCluster) -> None:
    cluster.lab.xid(79)
    cluster.lab.step()
    assert cluster.lab.scheduler.drained


def test_a_node_that_passes_stays_in_service(cluster: SimulatedCluster) -> None:
    cluster.start()
    pass_burn_in(cluster)
    assert (cluster.row().verdict, cluster.row().outcome) == ("passed", "In service.")
    assert not cluster.lab.scheduler.reserved
    request = cluster.lab.scheduler.submissions[0]
    assert (request.required_nodes, request.reservation, request.gpus_per_node, request.exclusive) == (
        ("dgx-01",), cluster.burn_in.reservation, 2, True,
    )  # fmt: skip
    golden = {
        (row.test, row.kind): (row.model, row.driver, row.values, row.count) for row in GoldenRecord.objects.all()
    }
    assert golden == {
        ("matrix", "GPU"): ("NVIDIA H100", "570.1", [700.0], 1),
        ("copy", "host to GPU"): ("NVIDIA H100", "570.1", [24.8], 1),
    }
    assert [entry.action for entry in AuditEntry.objects.order_by("id")] == ["burnin.started"]


def test_nodes_with_different_numbers_of_gpus_test_all_of_them(cluster: SimulatedCluster) -> None:
    cluster.set_node("dgx-02", gpus=4)
    cluster.set_node("dgx-03", gpus=0)
    cluster.start("dgx-01", "dgx-02", "dgx-03", "dgx-04")
    cluster.until_running()
    request = cluster.lab.scheduler.submissions[0]
    assert (request.gpus_per_node, request.exclusive) == (0, True), "exclusive brings the GPUs of each node"
    script = Path(request.script).read_text()
    assert subprocess.run(["bash", "-n", request.script], check=False).returncode == 0
    steps = re.findall(r"--nodes=(\d) --ntasks=\d --nodelist=(\S+) --gres=(\S+)", script)
    assert steps == [("1", "dgx-02", "gpu:4"), ("2", "dgx-01,dgx-04", "gpu:2"), ("1", "dgx-03", "none")]
    assert {row.node: row.gpus for row in cluster.burn_in.nodes.all()} == {
        "dgx-01": 2, "dgx-02": 4, "dgx-03": 0, "dgx-04": 2,
    }  # fmt: skip


def test_a_node_that_a_rule_drained_returns_and_its_entry_is_cleared(cluster: SimulatedCluster) -> None:
    drain_by_rule(cluster)
    cluster.start()
    cluster.until_running()
    order = [part for part in cluster.lab.scheduler.requests if part in ("reserve", "undrain")]
    assert order.index("reserve") < order.index("undrain"), "others stay out because of the reservation"
    assert cluster.lab.scheduler.reserved
    cluster.write(good_lines())
    cluster.end_job()
    cluster.until_ended()
    assert not cluster.lab.scheduler.drained
    entry = cluster.lab.entry("off-bus")
    assert (entry.state, entry.decision_reason) == ("cleared", f"Burn-in {cluster.burn_in.pk} passed.")
    cluster.lab.step()
    assert [order.action for order in NodeOrder.objects.order_by("id")] == ["drain", "undrain"]


def test_a_node_that_failed_repeatedly_returns_although_its_past_failures_are_still_counted(
    cluster: SimulatedCluster,
) -> None:
    for name in cluster.lab.names:
        ran(72.0, ago=300, nodes=[name])
    for number in range(6):
        ran(2.0, ago=40 + number, nodes=["dgx-01"], cause="gpu.off_bus", project=("default", "vision")[number % 2])
    count()
    assess()
    cluster.lab.step()
    assert cluster.lab.scheduler.drained
    cluster.start()
    cluster.until_running()
    cluster.lab.step()  # the failures of last week are observed during the burn-in, too
    cluster.write(good_lines())
    cluster.end_job()
    cluster.until_ended()
    assert not cluster.lab.scheduler.drained
    assess()
    cluster.lab.step()
    assert (cluster.lab.entry("repeat-offender").state, cluster.lab.scheduler.drained) == ("cleared", {})


def test_a_node_that_fails_is_drained_with_the_reason(cluster: SimulatedCluster) -> None:
    drain_by_rule(cluster)
    cluster.start()
    cluster.until_running()
    cluster.write(
        [*good_lines()[:-1], line("memory", "GPU 1", outcome="failed", detail="12 words differ"), line("end", "x")]
    )
    cluster.end_job()
    cluster.until_ended()
    reason = "[node] GPU 1, memory: 12 words differ (1 of 2 times) (vigil: burn-in)"
    assert cluster.lab.scheduler.drained == {"dgx-01": reason}
    assert not cluster.lab.scheduler.reserved
    assert cluster.lab.entry("off-bus").state == "open"
    assert (cluster.row().verdict, cluster.row().outcome) == ("failed", "Drained.")
    assert not GoldenRecord.objects.exists()


def test_an_xid_during_the_tests_fails_the_node(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    cluster.lab.xid(79)
    cluster.lab.step()
    cluster.write(good_lines())
    cluster.end_job()
    cluster.until_ended()
    assert cluster.row().verdict == "failed"
    assert "(health rule off-bus)" in cluster.texts()[0]
    assert cluster.lab.scheduler.drained["dgx-01"].startswith("[node] Xid 79 on GPU 0"), "the rule's drain stands"


@pytest.mark.parametrize("state", ["draining", "drained+completing", "allocated"])
def test_waits_while_a_job_runs_there(cluster: SimulatedCluster, state: str) -> None:
    drain_by_rule(cluster)
    cluster.set_node(state=state, cpus_used=8 if state == "allocated" else 0)
    cluster.start()
    cluster.tick(4)
    assert (cluster.burn_in.state, cluster.burn_in.detail) == ("waiting", "Waits for jobs on dgx-01 to end.")
    assert "undrain" not in cluster.lab.scheduler.requests
    cluster.set_node(state="idle" if state == "allocated" else "drained", cpus_used=0)
    cluster.until_running()


def test_a_persons_drain_needs_agreement(cluster: SimulatedCluster) -> None:
    cluster.lab.scheduler.drain("dgx-01", "fan 3")
    cluster.read_nodes()
    with pytest.raises(NeedsAgreement, match="fan 3"):
        cluster.start()
    cluster.start(may_undrain=True)
    pass_burn_in(cluster)
    assert not cluster.lab.scheduler.drained


def test_a_persons_drain_needs_agreement_again_after_a_burn_in_without_a_verdict(cluster: SimulatedCluster) -> None:
    cluster.lab.scheduler.drain("dgx-01", "fan 3")
    cluster.read_nodes()
    cluster.start(may_undrain=True)
    cluster.until_running()
    cancel(cluster.user, cluster.burn_in)
    cluster.end_job("cancelled")
    cluster.until_ended()
    with pytest.raises(NeedsAgreement, match="before: fan 3"):
        cluster.start()
    page = signed_in(cluster.user).get("/drains").content.decode()
    assert "Whoever drained it agreed" in page


def test_an_approved_drain_needs_no_agreement(cluster: SimulatedCluster, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    cluster.lab.xid(79)
    cluster.lab.step()
    inbox.approve(cluster.user, cluster.lab.entry().pk, "board ordered")
    cluster.lab.step()
    assert cluster.lab.scheduler.drained
    cluster.start()
    cluster.until_running()
    cancel(cluster.user, cluster.burn_in)
    cluster.end_job("cancelled")
    cluster.until_ended()
    assert "no result of burn-in" in cluster.lab.scheduler.drained["dgx-01"]
    cluster.start()
    pass_burn_in(cluster)
    assert not cluster.lab.scheduler.drained
    assert cluster.lab.entry().state == "cleared"


def test_a_reason_that_came_since_the_request_stands(cluster: SimulatedCluster) -> None:
    drain_by_rule(cluster)
    cluster.start()
    cluster.lab.scheduler.drain("dgx-01", "waits for a part")
    cluster.read_nodes()
    cluster.until_ended()
    assert cluster.lab.scheduler.drained == {"dgx-01": "waits for a part"}
    assert "waits for a part" in cluster.burn_in.problem
    assert not cluster.lab.scheduler.submissions


def test_a_worker_killed_between_submission_and_its_record_submits_once(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.lab.scheduler.loses_answers = True
    cluster.until(lambda _: bool(cluster.lab.scheduler.submissions))
    cluster.lab.scheduler.loses_answers = False
    cluster.until_running()
    assert len(cluster.lab.scheduler.submissions) == 1


@pytest.mark.parametrize("part", ["reserve", "undrain", "nodes"])
def test_waits_for_a_scheduler_that_is_away(cluster: SimulatedCluster, part: str) -> None:
    drain_by_rule(cluster)
    cluster.lab.scheduler.broken_parts = {part: away()}
    cluster.start()
    cluster.tick(5)
    assert cluster.burn_in.state in ("waiting", "starting")
    cluster.lab.scheduler.broken_parts = {}
    NodeOrder.objects.update(tried_at=None)
    pass_burn_in(cluster)


def test_ends_where_the_scheduler_refuses_the_reservation(cluster: SimulatedCluster) -> None:
    drain_by_rule(cluster)
    reason = dict(cluster.lab.scheduler.drained)
    cluster.lab.scheduler.broken_parts = {"reserve": SchedulerError("Access denied", permanent=True)}
    cluster.start()
    cluster.until_ended()
    assert cluster.burn_in.problem == "Access denied"
    assert cluster.lab.scheduler.drained == reason


def test_a_reservation_that_cannot_be_removed_is_tried_again(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    cluster.write(good_lines())
    cluster.end_job()
    cluster.lab.scheduler.broken_parts = {"unreserve": away()}
    cluster.tick(5)
    assert (cluster.burn_in.state, cluster.burn_in.detail) == ("returning", "no answer within 10 s")
    cluster.lab.scheduler.broken_parts = {}
    cluster.until_ended()
    assert not cluster.lab.scheduler.reserved


def test_cancelled_while_it_runs_drains_again_what_was_drained(cluster: SimulatedCluster) -> None:
    drain_by_rule(cluster)
    cluster.start()
    cluster.until_running()
    cancel(cluster.user, cluster.burn_in)
    cluster.tick()
    assert cluster.lab.scheduler.cancelled == [cluster.burn_in.scheduler_id]
    cluster.end_job("cancelled")
    cluster.until_ended()
    reason = cluster.lab.scheduler.drained["dgx-01"]
    assert reason.startswith(f"[node] no result of burn-in {cluster.burn_in.pk}; before: [node] Xid 79 on GPU 0")
    assert cluster.row().verdict == "inconclusive"
    with pytest.raises(Conflict):
        cancel(cluster.user, cluster.burn_in)


def test_cancelled_before_its_undrain_was_carried_out(cluster: SimulatedCluster) -> None:
    drain_by_rule(cluster)
    cluster.lab.scheduler.broken_parts = {"undrain": away()}
    cluster.start()
    cluster.until(lambda burn_in: burn_in.state == "starting")
    cluster.tick()
    cancel(cluster.user, cluster.burn_in)
    cluster.lab.scheduler.broken_parts = {}
    cluster.until_ended()
    cluster.lab.step()
    assert cluster.lab.scheduler.drained
    assert not NodeOrder.objects.open().exists()


@pytest.mark.parametrize("requeued", [False, True])
def test_a_node_that_dies_in_it_is_drained(cluster: SimulatedCluster, requeued: bool) -> None:
    cluster.start()
    cluster.until_running()
    if requeued:
        again: dict[str, Any] = {"state": "pending", "restart_count": 1, "previous_nodes": ("dgx-01",)}
        cluster.lab.scheduler.update_job(cluster.burn_in.scheduler_id, **again)
        cluster.tick()
        assert cluster.lab.scheduler.cancelled, "it must not start again once the node is back"
    cluster.end_job("cancelled" if requeued else "node_fail")
    cluster.until_ended()
    assert cluster.row().verdict == "failed"
    assert cluster.lab.scheduler.drained == {"dgx-01": "[node] The node failed during the burn-in (vigil: burn-in)"}


def test_a_node_that_died_before_an_upgrade_that_rewords_it_is_drained(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    again: dict[str, Any] = {"state": "pending", "restart_count": 1, "previous_nodes": ("dgx-01",)}
    cluster.lab.scheduler.update_job(cluster.burn_in.scheduler_id, **again)
    cluster.tick()
    cluster.burn_in.nodes.update(outcome="An older version wrote this.")
    cluster.end_job("cancelled")
    cluster.until_ended()
    assert cluster.row().verdict == "failed"


def test_a_node_that_died_and_is_up_again_is_drained(cluster: SimulatedCluster) -> None:
    cluster.start("dgx-01", "dgx-02")
    cluster.until_running()
    cluster.end_job("node_fail")
    cluster.set_node("dgx-02", state="idle", booted_at=time.time() + 60)
    cluster.until_ended()
    assert list(cluster.lab.scheduler.drained) == ["dgx-02"]
    assert cluster.row().verdict == "inconclusive"


def test_a_job_that_the_scheduler_forgot_is_over_after_a_while(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    cluster.lab.scheduler.jobs.clear()
    cluster.tick(2)
    assert cluster.burn_in.job_ended_at is None
    BurnIn.objects.update(unknown_since="2026-01-01T00:00Z")
    cluster.tick()
    assert cluster.burn_in.job_ended_at is not None


def test_results_are_stored_as_they_are_made(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    cluster.write([line("copy", "host to GPU 0", value=20.0, unit="GB/s")])
    cluster.tick()
    cluster.write([line("copy", "host to GPU 0", value=22.0, unit="GB/s")])
    cluster.write_bytes(b'{"test": "copy", "it')
    cluster.tick()
    test = cluster.row().tests.get()
    assert (test.count, test.values, test.basis) == (2, [20.0, 22.0], H100)


def test_what_a_broken_node_writes_is_not_believed(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    cluster.write_bytes(b"\xff" * 300_000)
    cluster.write_bytes(b'\n[1]\n{"test": "format c:"}\n' + b"x" * 20_000 + b"\n")
    for _ in range(3):
        cluster.tick()
    cluster.write([line("matrix", "GPU 0", value=1e400, digest=BAD[:3], detail="\u202e" * 500)])
    cluster.tick()
    test = cluster.row().tests.get()
    assert (test.values, test.digests) == ([], [])


def test_the_program_that_cannot_start_gives_no_verdict(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    cluster.end_job("failed")
    cluster.until_ended()
    assert cluster.row().verdict == "inconclusive"
    assert cluster.row().outcome == "In service."


def test_no_cleared_finding_returns_a_node_that_failed(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    cluster.write([*good_lines()[:-1], line("memory", "GPU 1", outcome="failed", detail="12 words differ")])
    cluster.end_job()
    cluster.until_ended()
    assert cluster.row().verdict == "failed"
    cluster.lab.xid(79)
    cluster.lab.step()
    entry = cluster.lab.entry()
    assert (entry.decision, entry.order) == ("proposed", None), "the node is drained already, and not by a rule"
    inbox.clear(cluster.user, entry.pk, "looked at it")
    cluster.lab.step()
    cluster.lab.step()
    assert list(cluster.lab.scheduler.drained) == ["dgx-01"]
    assert not NodeOrder.objects.by_health_rules().exists(), "a burn-in's drains use up no limit of the rules"


def test_a_gpu_that_the_scheduler_no_longer_offers_is_not_taken_for_repaired(cluster: SimulatedCluster) -> None:
    drain_by_rule(cluster)
    Node.objects.filter(name="dgx-01").update(gpus=0)
    cluster.start()
    assert cluster.row().gpus == 2, "as many as its agent lists"
    pass_burn_in(cluster)
    assert cluster.row().verdict == "passed", "both were tested"


def test_without_a_finding_about_a_gpu_the_scheduler_counts(cluster: SimulatedCluster) -> None:
    cluster.lab.machine()
    Node.objects.filter(name="dgx-01").update(gpus=0)
    cluster.start()
    assert cluster.row().gpus == 0
