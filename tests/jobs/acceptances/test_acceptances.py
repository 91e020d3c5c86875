"""An acceptance goes from the request to a result with reasons, over REST, and through faults on its way."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from jobs.acceptances.advance import AGENT_REPORT_TIMEOUT, RULE_LAG, advance, advance_all
from jobs.burnins.start import cancel as cancel_burn_in
from jobs.tasks import advance_acceptances
from nodes.acceptance.history import LASTING_S
from nodes.models import Acceptance, Agent, BurnIn
from portal.models import AuditEntry
from tests.jobs.burnins.simulated_cluster import SimulatedCluster, good_lines, line
from tests.lab import person

pytestmark = pytest.mark.django_db
NODES = ("dgx-01", "dgx-02")


def post(client: Client, address: str = "", **body: Any) -> Any:
    return client.post(f"/api/v1/acceptances{address}", body, content_type="application/json")


def begin(cluster: SimulatedCluster, client: Client, nodes: str = "dgx-[01-02]") -> Acceptance:
    response = post(client, nodes=nodes, seconds=60)
    assert response.status_code == 201, response.content
    found = Acceptance.objects.get(pk=response.json()["id"])
    cluster.burn_in = found.burn_in
    return found


def report_configuration(
    cluster: SimulatedCluster, *, generation: int = 5, driver: str = "999.1", percent: int = 95
) -> None:
    """Let the agents of both nodes report healthy GPUs, which work."""
    for name in NODES:
        machine = cluster.lab.machine(name)
        counters = {
            "ecc_uncorrected": 0, "pcie_width": 16, "pcie_width_most": 16, "pcie_generation": generation,
            "pcie_generation_most": 5, "power_cap_watts": 700, "nvlinks": [1] * 18,
        }  # fmt: skip
        gpus = [
            {"uuid": uuid, "index": i, "bus": f"00000000:0{i}:00.0", "name": "NVIDIA H100", "vbios": "96.00",
             "memory_mib": 81_559}
            for i, uuid in enumerate(machine.gpus)
        ]  # fmt: skip
        facts = machine.facts(
            time.time(), gpus=gpus, driver=driver if name == "dgx-02" else "999.1", kernel="Linux 6.8",
            topology=[["X", "NV18"], ["NV18", "X"]],
            mounts=[{"mount": "/data", "type": "nfs4", "source": "nfs01:/data"}],
        )  # fmt: skip
        events = [machine.event("gpu.counters", time.time(), gpu=uuid, **counters) for uuid in machine.gpus]
        samples = machine.batch(int(time.time()) - 10, gpu_percent=percent, throttle=0)
        assert machine.post(facts, *events, samples).status_code == 200


def write_results(cluster: SimulatedCluster, *, memory_error: bool = False) -> None:
    limits = {"memlock_bytes": -1, "open_files": 1_048_576, "shm_bytes": 2**36}
    for name, partner in (NODES, reversed(NODES)):
        first, *middle, end = good_lines()
        found = [first | limits, *middle, line("pair", partner, value=40.0, unit="GB/s")]
        if memory_error and name == "dgx-02":
            found.append(line("memory", "GPU 1", outcome="failed", detail="12 words differ"))
        cluster.write([*found, end], name)


def finish(cluster: SimulatedCluster, acceptance: Acceptance) -> dict[str, Any]:
    """End the tests and the burn-in, judge, and return the clauses' outcomes by key."""
    cluster.end_job()
    cluster.until_ended()
    now = timezone.now()
    BurnIn.objects.update(job_ended_at=now, started_at=now - timedelta(hours=48), ended_at=now - AGENT_REPORT_TIMEOUT)
    advance_acceptances()
    acceptance.refresh_from_db()
    return {clause["key"]: clause for clause in acceptance.clauses}


def test_healthy_nodes_are_accepted(cluster: SimulatedCluster, client: Client) -> None:
    acceptance = begin(cluster, client)
    assert {clause["outcome"] for clause in acceptance.clauses if clause["group"] == "tests"} == {"pending"}
    cluster.until_running()
    report_configuration(cluster)
    advance_acceptances()
    report_configuration(cluster, generation=1, percent=0)  # idle again
    write_results(cluster)
    found = finish(cluster, acceptance)
    outcomes = {key: clause["outcome"] for key, clause in found.items()}
    assert outcomes == dict.fromkeys(outcomes, "passed"), acceptance.summary
    assert acceptance.result == "accepted"
    assert "1 of 1" in found["pairs"]["measured"]
    assert found["failures"]["measured"].startswith("0\N{NO-BREAK SPACE}failures in ")
    actions = list(AuditEntry.objects.order_by("id").values_list("action", flat=True))
    assert actions == ["burnin.started", "acceptance.started", "acceptance.accepted"]
    advance_acceptances()
    assert AuditEntry.objects.count() == 3


def test_gpus_that_the_scheduler_does_not_list_must_be_tested_all_the_same(
    cluster: SimulatedCluster, client: Client
) -> None:
    for name in NODES:
        cluster.lab.machine(name)
        cluster.set_node(name, gpus=0)
    acceptance = begin(cluster, client)
    assert acceptance.gpu_count == 4
    cluster.until_running()
    report_configuration(cluster)
    advance_acceptances()
    for name in NODES:
        cluster.write(good_lines(0), name)
    found = finish(cluster, acceptance)
    assert acceptance.result == "rejected"
    assert "dgx-01: Found 0 of 2 GPUs." in found["burn_in"]["details"]
    assert any("the scheduler lists 0 of 2" in text for text in found["gpus"]["details"])


def test_agents_may_report_again_after_an_outage_of_the_portal(cluster: SimulatedCluster, client: Client) -> None:
    acceptance = begin(cluster, client)
    cluster.until_running()
    report_configuration(cluster)
    advance_acceptances()
    write_results(cluster)
    Agent.objects.update(heard_at=timezone.now() - timedelta(minutes=1))
    cluster.end_job()
    cluster.until_ended()
    advance_acceptances()
    acceptance.refresh_from_db()
    assert (acceptance.is_active, acceptance.result) == (True, "")
    report_configuration(cluster, generation=1, percent=0)
    advance_acceptances()
    acceptance.refresh_from_db()
    assert "rejected" not in (acceptance.result or "rejected"), acceptance.summary


def test_it_waits_for_what_agents_still_have_to_report_of_the_tests(cluster: SimulatedCluster, client: Client) -> None:
    acceptance = begin(cluster, client)
    cluster.until_running()
    report_configuration(cluster)
    write_results(cluster)
    cluster.end_job()
    cluster.until_ended()
    BurnIn.objects.update(job_ended_at=timezone.now())
    Agent.objects.update(heard_at=timezone.now())
    advance_acceptances()
    assert Acceptance.objects.get().is_active, "the agents post, but their newest samples are those of the tests"
    newer = int(time.time() + RULE_LAG.total_seconds())
    for name in NODES:
        cluster.lab.machine(name).post(cluster.lab.machine(name).batch(newer, gpu_percent=0))
    cluster.lab.xid(79, "dgx-02")
    BurnIn.objects.update(job_ended_at=timezone.now())  # so that it happened during the tests
    advance_acceptances()
    assert Acceptance.objects.get().is_active, "an Xid is not judged yet"
    cluster.lab.step()
    advance_acceptances()
    acceptance.refresh_from_db()
    assert acceptance.result == "rejected"


def test_what_fails_for_long_during_the_tests_rejects(cluster: SimulatedCluster, client: Client) -> None:
    acceptance = begin(cluster, client)
    cluster.until_running()
    report_configuration(cluster)
    Agent.objects.filter(node="dgx-01").update(clock_offset_s=30.0)
    advance_acceptances()
    acceptance.refresh_from_db()
    (clock,) = (clause for clause in acceptance.clauses if clause["key"] == "clock")
    clock["history"]["since"] -= LASTING_S
    acceptance.save()
    advance_acceptances()
    report_configuration(cluster)
    write_results(cluster)
    found = finish(cluster, acceptance)
    assert (found["clock"]["outcome"], acceptance.result) == ("failed", "rejected")
    assert "dgx-01: +30.0 s." in found["clock"]["details"]


def test_each_fault_is_a_failed_clause_with_its_reason(cluster: SimulatedCluster, client: Client) -> None:
    acceptance = begin(cluster, client)
    cluster.until_running()
    report_configuration(cluster, generation=3, driver="550.54")
    write_results(cluster, memory_error=True)
    cluster.lab.xid(79, "dgx-02")
    cluster.lab.step()
    advance_acceptances()
    found = finish(cluster, acceptance)
    failed = {key for key, clause in found.items() if clause["outcome"] == "failed"}
    assert {"driver", "pcie", "burn_in"} <= failed
    assert acceptance.result == "rejected"
    assert "550.54: dgx-02." in found["driver"]["details"]
    assert any("12 words differ" in text for text in found["burn_in"]["details"])
    assert any("health rule off-bus" in text for text in found["failures"]["details"])
    assert acceptance.summary.startswith(f"Of {len(found)} clauses {len(failed)} failed (")


def test_an_xid_during_passed_tests_is_judged_as_a_failure_only(cluster: SimulatedCluster, client: Client) -> None:
    acceptance = begin(cluster, client)
    cluster.until_running()
    report_configuration(cluster)
    advance_acceptances()
    write_results(cluster)
    cluster.lab.xid(79, "dgx-02")
    cluster.lab.step()
    found = finish(cluster, acceptance)
    assert cluster.row("dgx-02").verdict == "failed", "the node itself is not in order"
    failed = {key for key, clause in found.items() if clause["outcome"] == "failed"}
    assert failed == {"failures"}, acceptance.summary


@pytest.mark.parametrize("recurs", [True, False])
def test_a_finding_from_before_the_tests_counts_if_it_is_observed_again(
    cluster: SimulatedCluster, client: Client, recurs: bool
) -> None:
    cluster.lab.xid(79, "dgx-02")
    cluster.lab.step()
    acceptance = begin(cluster, client)
    cluster.until_running()
    report_configuration(cluster)
    advance_acceptances()
    write_results(cluster)
    if recurs:
        cluster.lab.xid(79, "dgx-02")
        cluster.lab.step()
    found = finish(cluster, acceptance)
    assert found["failures"]["outcome"] == ("failed" if recurs else "passed"), acceptance.summary
    assert any("again (health rule off-bus)" in text for text in found["failures"]["details"]) == recurs
    assert cluster.row("dgx-02").verdict == ("failed" if recurs else "passed")


def test_a_node_that_dies_rejects(cluster: SimulatedCluster, client: Client) -> None:
    acceptance = begin(cluster, client)
    cluster.until_running()
    report_configuration(cluster)
    advance_acceptances()
    cluster.write(good_lines(), "dgx-01")
    cluster.set_node("dgx-02", state="down")
    Agent.objects.filter(node="dgx-02").update(heard_at=timezone.now() - timedelta(hours=1))
    cluster.end_job("node_fail")
    found = finish(cluster, acceptance)
    assert acceptance.result == "rejected"
    assert found["burn_in"]["outcome"] == "not checked"
    assert "dgx-02: The node failed during the burn-in." in found["burn_in"]["details"]
    assert "dgx-02: The node failed during the burn-in." in found["failures"]["details"]
    assert found["agents"]["details"] == ["dgx-02: no agent reports."]


def test_a_node_that_died_before_an_upgrade_that_rewords_it_rejects(cluster: SimulatedCluster, client: Client) -> None:
    acceptance = begin(cluster, client)
    cluster.until_running()
    report_configuration(cluster)
    advance_acceptances()
    cluster.write(good_lines(), "dgx-01")
    cluster.set_node("dgx-02", state="down")
    cluster.end_job("node_fail")
    cluster.until_ended()
    row = cluster.row("dgx-02")
    row.findings = [finding | {"text": "An older version wrote this."} for finding in row.findings]
    row.save(update_fields=["findings"])
    found = finish(cluster, acceptance)
    assert "dgx-02: The node failed during the burn-in." in found["failures"]["details"]


def test_cancelled(cluster: SimulatedCluster, client: Client) -> None:
    acceptance = begin(cluster, client)
    assert post(client, f"/{acceptance.pk}/cancel").status_code == 200
    cluster.until_ended()
    advance_acceptances()
    acceptance.refresh_from_db()
    found = {clause["key"]: clause["outcome"] for clause in acceptance.clauses}
    assert (found["burn_in"], found["pairs"], found["failures"]) == ("not checked",) * 3
    assert acceptance.result == "rejected", "its agents do not report"
    assert post(client, f"/{acceptance.pk}/cancel").status_code == 409
    assert AuditEntry.objects.filter(action="acceptance.cancelled").count() == 1


def test_cancelled_by_its_burn_in_it_is_inconclusive(cluster: SimulatedCluster, client: Client) -> None:
    for name in NODES:
        cluster.lab.machine(name)
    acceptance = begin(cluster, client)
    cancel_burn_in(cluster.user, acceptance.burn_in)
    cluster.until_ended()
    advance_acceptances()
    acceptance.refresh_from_db()
    assert (acceptance.result, acceptance.is_active) == ("inconclusive", False)


def test_a_worker_with_old_rows_changes_nothing(cluster: SimulatedCluster, client: Client) -> None:
    acceptance = begin(cluster, client)
    cluster.until_running()
    report_configuration(cluster)
    old = Acceptance.objects.select_related("burn_in").get()
    advance_acceptances()
    newer = Acceptance.objects.get()
    report_configuration(cluster, generation=1)
    advance(old)
    assert Acceptance.objects.get().observed_at == newer.observed_at
    Acceptance.objects.update(result="rejected", summary="Judged.")
    advance(Acceptance(**{f.attname: getattr(old, f.attname) for f in Acceptance._meta.concrete_fields}))
    assert Acceptance.objects.get().summary == "Judged."
    assert acceptance.pk == newer.pk


def test_an_acceptance_that_cannot_be_advanced_does_not_stop_others(
    cluster: SimulatedCluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, fine = begin(cluster, client, "dgx-01"), begin(cluster, client, "dgx-02")
    Acceptance.objects.filter(pk=broken.pk).update(peaks={"GPU-1": {"unknown": 1}}, observed_at=None)
    before = Acceptance.objects.get(pk=fine.pk).observed_at
    advance_all()
    assert Acceptance.objects.get(pk=fine.pk).observed_at != before


@pytest.mark.parametrize(
    "body",
    [{}, {"nodes": ""}, {"nodes": "dgx-[01"}, {"nodes": "dgx-99"}, {"nodes": "dgx-[001-900]"}, {"nodes": "dgx-01;rm"},
     {"nodes": "dgx-01", "seconds": 59}, {"nodes": "dgx-01", "seconds": 172_801}, {"nodes": "dgx-01", "force": True}],
)  # fmt: skip
def test_refuses_over_rest(client: Client, body: dict[str, Any]) -> None:
    assert post(client, **body).status_code == 422
    assert not Acceptance.objects.exists()
    assert not BurnIn.objects.exists()


def test_a_node_in_another_test_is_refused(cluster: SimulatedCluster, client: Client) -> None:
    begin(cluster, client)
    refused = post(client, nodes="dgx-[02-03]")
    assert (refused.status_code, "dgx-02" in refused.json()["detail"]) == (409, True)
    assert (Acceptance.objects.count(), BurnIn.objects.count()) == (1, 1)


def test_a_persons_drain_needs_agreement(cluster: SimulatedCluster, client: Client) -> None:
    cluster.lab.scheduler.drain("dgx-01", "fan 3")
    cluster.read_nodes()
    refused = post(client, nodes="dgx-01")
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:vigil:problem:drained")
    assert post(client, nodes="dgx-01", may_undrain=True).status_code == 201


def test_only_for_sysadmins(cluster: SimulatedCluster, client: Client) -> None:
    acceptance = begin(cluster, client)
    mira = Client()
    mira.force_login(person("mira"))
    assert post(mira, nodes="dgx-05").status_code == 403
    assert post(mira, f"/{acceptance.pk}/cancel").status_code == 403
    for place in ("", f"/{acceptance.pk}"):
        assert mira.get(f"/api/v1/acceptances{place}").status_code == 403
    assert not AuditEntry.objects.filter(action="acceptance.cancelled").exists()


def test_lists(cluster: SimulatedCluster, client: Client, django_assert_max_num_queries: Any) -> None:
    for number in range(1, 6):
        begin(cluster, client, f"dgx-{number:02}")
    with django_assert_max_num_queries(8):
        found = client.get("/api/v1/acceptances?state=active&limit=3").json()
    assert [row["nodes"] for row in found["items"]] == ["dgx-05", "dgx-04", "dgx-03"]
    more = client.get(f"/api/v1/acceptances?state=active&limit=3&cursor={found['next']}").json()
    assert [row["nodes"] for row in more["items"]] == ["dgx-02", "dgx-01"]
    assert client.get("/api/v1/acceptances?state=ended").json()["items"] == []
    payload = client.get(f"/api/v1/acceptances/{more['items'][0]['id']}").json()
    assert (payload["state"], len(payload["clauses"]), payload["result"]) == ("waiting", 22, "")
    assert client.get("/api/v1/acceptances/999").status_code == 404
    assert client.get(f"/api/v1/acceptances/{2**63}").status_code == 404
