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
from tests.jobs.burnins.bench import BAD, H100, Bench, away, good_lines, line
from tests.jobs.reliability.lab import count, ran
from tests.lab import signed_in

pytestmark = pytest.mark.django_db


def pass_burn_in(bench: Bench) -> None:
    bench.until_running()
    bench.write(good_lines())
    bench.end_job()
    bench.until_ended()


def drain_by_rule(bench: Bench) -> None:
    bench.lab.xid(79)
    bench.lab.step()
    assert bench.lab.scheduler.drained


def test_a_node_that_passes_stays_in_service(bench: Bench) -> None:
    bench.start()
    pass_burn_in(bench)
    assert (bench.row().verdict, bench.row().outcome) == ("passed", "In service.")
    assert not bench.lab.scheduler.reserved
    request = bench.lab.scheduler.submissions[0]
    assert (request.required_nodes, request.reservation, request.gpus_per_node, request.exclusive) == (
        ("dgx-01",), f"vigil_burnin_{bench.burn_in.pk}", 2, True,
    )  # fmt: skip
    golden = {
        (row.test, row.kind): (row.model, row.driver, row.values, row.count) for row in GoldenRecord.objects.all()
    }
    assert golden == {
        ("matrix", "GPU"): ("NVIDIA H100", "570.1", [700.0], 1),
        ("copy", "host to GPU"): ("NVIDIA H100", "570.1", [24.8], 1),
    }
    assert [entry.action for entry in AuditEntry.objects.order_by("id")] == ["burnin.started"]


def test_nodes_with_different_numbers_of_gpus_test_all_of_them(bench: Bench) -> None:
    bench.set_node("dgx-02", gpus=4)
    bench.set_node("dgx-03", gpus=0)
    bench.start("dgx-01", "dgx-02", "dgx-03", "dgx-04")
    bench.until_running()
    request = bench.lab.scheduler.submissions[0]
    assert (request.gpus_per_node, request.exclusive) == (0, True), "exclusive brings the GPUs of each node"
    script = Path(request.script).read_text()
    assert subprocess.run(["bash", "-n", request.script], check=False).returncode == 0
    steps = re.findall(r"--nodes=(\d) --ntasks=\d --nodelist=(\S+) --gres=(\S+)", script)
    assert steps == [("1", "dgx-02", "gpu:4"), ("2", "dgx-01,dgx-04", "gpu:2"), ("1", "dgx-03", "none")]
    assert {row.node: row.gpus for row in bench.burn_in.nodes.all()} == {
        "dgx-01": 2, "dgx-02": 4, "dgx-03": 0, "dgx-04": 2,
    }  # fmt: skip


def test_a_node_that_a_rule_drained_returns_and_its_entry_is_cleared(bench: Bench) -> None:
    drain_by_rule(bench)
    bench.start()
    bench.until_running()
    order = [part for part in bench.lab.scheduler.asked if part in ("reserve", "undrain")]
    assert order == ["reserve", "undrain"], "others stay out because of the reservation"
    assert bench.lab.scheduler.reserved
    bench.write(good_lines())
    bench.end_job()
    bench.until_ended()
    assert not bench.lab.scheduler.drained
    entry = bench.lab.entry("off-bus")
    assert (entry.state, entry.decision_reason) == ("cleared", f"Burn-in {bench.burn_in.pk} passed.")
    bench.lab.step()
    assert [order.action for order in NodeOrder.objects.order_by("id")] == ["drain", "undrain"]


def test_a_node_that_kept_failing_returns_although_its_past_failures_are_still_counted(bench: Bench) -> None:
    for name in bench.lab.names:
        ran(72.0, ago=300, nodes=[name])
    for number in range(6):
        ran(2.0, ago=40 + number, nodes=["dgx-01"], cause="gpu.off_bus", project=("default", "vision")[number % 2])
    count()
    assess()
    bench.lab.step()
    assert bench.lab.scheduler.drained
    bench.start()
    bench.until_running()
    bench.lab.step()  # the failures of last week are observed during the burn-in, too
    bench.write(good_lines())
    bench.end_job()
    bench.until_ended()
    assert not bench.lab.scheduler.drained
    assess()
    bench.lab.step()
    assert (bench.lab.entry("repeat-offender").state, bench.lab.scheduler.drained) == ("cleared", {})


def test_a_node_that_fails_is_drained_with_the_reason(bench: Bench) -> None:
    drain_by_rule(bench)
    bench.start()
    bench.until_running()
    bench.write(
        [*good_lines()[:-1], line("memory", "GPU 1", outcome="failed", detail="12 words differ"), line("end", "x")]
    )
    bench.end_job()
    bench.until_ended()
    reason = "[node] GPU 1, memory: 12 words differ (1 of 2 times) (vigil: burn-in)"
    assert bench.lab.scheduler.drained == {"dgx-01": reason}
    assert not bench.lab.scheduler.reserved
    assert bench.lab.entry("off-bus").state == "open"
    assert (bench.row().verdict, bench.row().outcome) == ("failed", "Drained.")
    assert not GoldenRecord.objects.exists()


def test_an_xid_during_the_tests_fails_the_node(bench: Bench) -> None:
    bench.start()
    bench.until_running()
    bench.lab.xid(79)
    bench.lab.step()
    bench.write(good_lines())
    bench.end_job()
    bench.until_ended()
    assert bench.row().verdict == "failed"
    assert "(health rule off-bus)" in bench.texts()[0]
    assert bench.lab.scheduler.drained["dgx-01"].startswith("[node] Xid 79 on GPU 0"), "the rule's drain stands"


@pytest.mark.parametrize("state", ["draining", "drained+completing", "allocated"])
def test_waits_while_a_job_runs_there(bench: Bench, state: str) -> None:
    drain_by_rule(bench)
    bench.set_node(state=state, cpus_used=8 if state == "allocated" else 0)
    bench.start()
    bench.tick(4)
    assert (bench.burn_in.state, bench.burn_in.detail) == ("waiting", "Waits for jobs on dgx-01 to end.")
    assert "undrain" not in bench.lab.scheduler.asked
    bench.set_node(state="idle" if state == "allocated" else "drained", cpus_used=0)
    bench.until_running()


def test_a_persons_drain_needs_agreement(bench: Bench) -> None:
    bench.lab.scheduler.drain("dgx-01", "fan 3")
    bench.read_nodes()
    with pytest.raises(NeedsAgreement, match="fan 3"):
        bench.start()
    bench.start(may_undrain=True)
    pass_burn_in(bench)
    assert not bench.lab.scheduler.drained


def test_a_persons_drain_needs_agreement_again_after_a_burn_in_without_a_verdict(bench: Bench) -> None:
    bench.lab.scheduler.drain("dgx-01", "fan 3")
    bench.read_nodes()
    bench.start(may_undrain=True)
    bench.until_running()
    cancel(bench.user, bench.burn_in)
    bench.end_job("cancelled")
    bench.until_ended()
    with pytest.raises(NeedsAgreement, match="before: fan 3"):
        bench.start()
    page = signed_in(bench.user).get("/drains").content.decode()
    assert "Whoever drained it agreed" in page


def test_an_approved_drain_needs_no_agreement(bench: Bench, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    bench.lab.xid(79)
    bench.lab.step()
    inbox.approve(bench.user, bench.lab.entry().pk, "board ordered")
    bench.lab.step()
    assert bench.lab.scheduler.drained
    bench.start()
    bench.until_running()
    cancel(bench.user, bench.burn_in)
    bench.end_job("cancelled")
    bench.until_ended()
    assert "no result of burn-in" in bench.lab.scheduler.drained["dgx-01"]
    bench.start()
    pass_burn_in(bench)
    assert not bench.lab.scheduler.drained
    assert bench.lab.entry().state == "cleared"


def test_a_reason_that_came_since_the_request_stands(bench: Bench) -> None:
    drain_by_rule(bench)
    bench.start()
    bench.lab.scheduler.drain("dgx-01", "waits for a part")
    bench.read_nodes()
    bench.until_ended()
    assert bench.lab.scheduler.drained == {"dgx-01": "waits for a part"}
    assert "waits for a part" in bench.burn_in.problem
    assert not bench.lab.scheduler.submissions


def test_a_worker_killed_between_submission_and_its_record_submits_once(bench: Bench) -> None:
    bench.start()
    bench.lab.scheduler.loses_answers = True
    bench.until(lambda _: bool(bench.lab.scheduler.submissions))
    bench.lab.scheduler.loses_answers = False
    bench.until_running()
    assert len(bench.lab.scheduler.submissions) == 1


@pytest.mark.parametrize("part", ["reserve", "undrain", "nodes"])
def test_waits_for_a_scheduler_that_is_away(bench: Bench, part: str) -> None:
    drain_by_rule(bench)
    bench.lab.scheduler.broken_parts = {part: away()}
    bench.start()
    bench.tick(5)
    assert bench.burn_in.state in ("waiting", "starting")
    bench.lab.scheduler.broken_parts = {}
    NodeOrder.objects.update(tried_at=None)
    pass_burn_in(bench)


def test_ends_where_the_scheduler_refuses_the_reservation(bench: Bench) -> None:
    drain_by_rule(bench)
    reason = dict(bench.lab.scheduler.drained)
    bench.lab.scheduler.broken_parts = {"reserve": SchedulerError("Access denied", permanent=True)}
    bench.start()
    bench.until_ended()
    assert bench.burn_in.problem == "Access denied"
    assert bench.lab.scheduler.drained == reason


def test_a_reservation_that_cannot_be_removed_is_tried_again(bench: Bench) -> None:
    bench.start()
    bench.until_running()
    bench.write(good_lines())
    bench.end_job()
    bench.lab.scheduler.broken_parts = {"unreserve": away()}
    bench.tick(5)
    assert (bench.burn_in.state, bench.burn_in.detail) == ("returning", "no answer within 10 s")
    bench.lab.scheduler.broken_parts = {}
    bench.until_ended()
    assert not bench.lab.scheduler.reserved


def test_cancelled_while_it_runs_drains_again_what_was_drained(bench: Bench) -> None:
    drain_by_rule(bench)
    bench.start()
    bench.until_running()
    cancel(bench.user, bench.burn_in)
    bench.tick()
    assert bench.lab.scheduler.cancelled == [bench.burn_in.scheduler_id]
    bench.end_job("cancelled")
    bench.until_ended()
    reason = bench.lab.scheduler.drained["dgx-01"]
    assert reason.startswith(f"[node] no result of burn-in {bench.burn_in.pk}; before: [node] Xid 79 on GPU 0")
    assert bench.row().verdict == "inconclusive"
    with pytest.raises(Conflict):
        cancel(bench.user, bench.burn_in)


def test_cancelled_before_its_undrain_was_carried_out(bench: Bench) -> None:
    drain_by_rule(bench)
    bench.lab.scheduler.broken_parts = {"undrain": away()}
    bench.start()
    bench.until(lambda burn_in: burn_in.state == "starting")
    bench.tick()
    cancel(bench.user, bench.burn_in)
    bench.lab.scheduler.broken_parts = {}
    bench.until_ended()
    bench.lab.step()
    assert bench.lab.scheduler.drained
    assert not NodeOrder.objects.open().exists()


@pytest.mark.parametrize("requeued", [False, True])
def test_a_node_that_dies_in_it_is_drained(bench: Bench, requeued: bool) -> None:
    bench.start()
    bench.until_running()
    if requeued:
        again: dict[str, Any] = {"state": "pending", "restart_count": 1, "previous_nodes": ("dgx-01",)}
        bench.lab.scheduler.update_job(bench.burn_in.scheduler_id, **again)
        bench.tick()
        assert bench.lab.scheduler.cancelled, "it must not start again once the node is back"
    bench.end_job("cancelled" if requeued else "node_fail")
    bench.until_ended()
    assert bench.row().verdict == "failed"
    assert bench.lab.scheduler.drained == {"dgx-01": "[node] The node failed during the burn-in (vigil: burn-in)"}


def test_a_node_that_died_before_an_upgrade_that_rewords_it_is_drained(bench: Bench) -> None:
    bench.start()
    bench.until_running()
    again: dict[str, Any] = {"state": "pending", "restart_count": 1, "previous_nodes": ("dgx-01",)}
    bench.lab.scheduler.update_job(bench.burn_in.scheduler_id, **again)
    bench.tick()
    bench.burn_in.nodes.update(outcome="An older version wrote this.")
    bench.end_job("cancelled")
    bench.until_ended()
    assert bench.row().verdict == "failed"


def test_a_node_that_died_and_is_up_again_is_drained(bench: Bench) -> None:
    bench.start("dgx-01", "dgx-02")
    bench.until_running()
    bench.end_job("node_fail")
    bench.set_node("dgx-02", state="idle", booted_at=time.time() + 60)
    bench.until_ended()
    assert list(bench.lab.scheduler.drained) == ["dgx-02"]
    assert bench.row().verdict == "inconclusive"


def test_a_job_that_the_scheduler_forgot_is_over_after_a_while(bench: Bench) -> None:
    bench.start()
    bench.until_running()
    bench.lab.scheduler.jobs.clear()
    bench.tick(2)
    assert bench.burn_in.job_ended_at is None
    BurnIn.objects.update(unknown_since="2026-01-01T00:00Z")
    bench.tick()
    assert bench.burn_in.job_ended_at is not None


def test_results_are_stored_as_they_are_made(bench: Bench) -> None:
    bench.start()
    bench.until_running()
    bench.write([line("copy", "host to GPU 0", value=20.0, unit="GB/s")])
    bench.tick()
    bench.write([line("copy", "host to GPU 0", value=22.0, unit="GB/s")])
    bench.write_bytes(b'{"test": "copy", "it')
    bench.tick()
    test = bench.row().tests.get()
    assert (test.count, test.values, test.basis) == (2, [20.0, 22.0], H100)


def test_what_a_broken_node_writes_is_not_believed(bench: Bench) -> None:
    bench.start()
    bench.until_running()
    bench.write_bytes(b"\xff" * 300_000)
    bench.write_bytes(b'\n[1]\n{"test": "format c:"}\n' + b"x" * 20_000 + b"\n")
    for _ in range(3):
        bench.tick()
    bench.write([line("matrix", "GPU 0", value=1e400, digest=BAD[:3], detail="\u202e" * 500)])
    bench.tick()
    test = bench.row().tests.get()
    assert (test.values, test.digests) == ([], [])


def test_the_program_that_cannot_start_gives_no_verdict(bench: Bench) -> None:
    bench.start()
    bench.until_running()
    bench.end_job("failed")
    bench.until_ended()
    assert bench.row().verdict == "inconclusive"
    assert bench.row().outcome == "In service."


def test_no_cleared_finding_returns_a_node_that_failed(bench: Bench) -> None:
    bench.start()
    bench.until_running()
    bench.write([*good_lines()[:-1], line("memory", "GPU 1", outcome="failed", detail="12 words differ")])
    bench.end_job()
    bench.until_ended()
    assert bench.row().verdict == "failed"
    bench.lab.xid(79)
    bench.lab.step()
    entry = bench.lab.entry()
    assert (entry.decision, entry.order) == ("proposed", None), "the node is drained already, and not by a rule"
    inbox.clear(bench.user, entry.pk, "looked at it")
    bench.lab.step()
    bench.lab.step()
    assert list(bench.lab.scheduler.drained) == ["dgx-01"]
    assert not NodeOrder.objects.by_health_rules().exists(), "a burn-in's drains use up no limit of the rules"


def test_a_gpu_that_the_scheduler_no_longer_offers_is_not_taken_for_repaired(bench: Bench) -> None:
    drain_by_rule(bench)
    Node.objects.filter(name="dgx-01").update(gpus=0)
    bench.start()
    assert bench.row().gpus == 2, "as many as its agent lists"
    pass_burn_in(bench)
    assert bench.row().verdict == "passed", "both were tested"


def test_without_a_finding_about_a_gpu_the_scheduler_counts(bench: Bench) -> None:
    bench.lab.machine()
    Node.objects.filter(name="dgx-01").update(gpus=0)
    bench.start()
    assert bench.row().gpus == 0
