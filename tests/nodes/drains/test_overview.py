"""/drains shows who took a node out of service, whether that still stands, what it costs, and what to do."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from nodes.cluster import drain, sync
from nodes.drains import maintenance
from nodes.models import BurnInNode, HotSpare, Node, NodeOrder, Reading
from nodes.remediation import inbox
from portal.models import User
from tests.lab import a_project, bearer, person, signed_in
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


def by_hand(lab: Lab, reason: str, *, by: str = "root", ago: float = 3600, node: str = "dgx-01", **more: Any) -> None:
    """Change a node as Slurm, a health check or a person with scontrol does."""
    changes = {"state": "drained", "reason": reason, "reason_by": by, "reason_at": time.time() - ago, **more}
    lab.scheduler.machines = [
        replace(machine, **changes) if machine.name == node else machine for machine in lab.scheduler.machines
    ]
    sync.read(lab.scheduler, Reading.Part.NODES)


def listed(user: User) -> dict[str, Any]:
    return {item["node"]: item for item in bearer(user, "read").get("/api/v1/drains").json()["items"]}


def test_names_who_drained_the_node(lab: Lab, ops: User) -> None:
    lab.xid(79)
    lab.step()
    by_hand(lab, "ECC on gpu3, RMA 4711", by="mira", node="dgx-02")
    by_hand(lab, "NHC: check_fs_mount:  /scratch not mounted", node="dgx-03")
    by_hand(lab, "Kill task failed", node="dgx-04")
    entry = lab.entry()
    found = listed(ops)
    assert {node: (item["holder"], item["holder_name"]) for node, item in found.items()} == {
        "dgx-01": ("rule", "off-bus"),
        "dgx-02": ("person", "mira"),
        "dgx-03": ("nhc", "NHC"),
        "dgx-04": ("slurm", "Slurm"),
    }
    assert found["dgx-01"]["entries"] == [entry.pk]
    assert (found["dgx-01"]["about"], found["dgx-01"]["standing"]) == ("node", "stands")
    assert found["dgx-01"]["order"]["rule"] == "off-bus"
    page = signed_in(ops).get("/drains").text.replace("\N{NO-BREAK SPACE}", " ")
    assert "4 nodes are out of service: 8 idle GPUs." in page
    assert f"/health/entries?node=dgx-01#entry-{entry.pk}" in page
    assert "NHC: check_fs_mount" in page


def test_a_burn_in_and_maintenance_explain_what_comes_next(lab: Lab, ops: User) -> None:
    by_hand(lab, "[node] GPU 3: bits differ", by="burn-in")
    by_hand(lab, "[node] new switch", by="maintenance-4", node="dgx-02")
    by_hand(lab, "water leak", by="", state="down", node="dgx-03")
    by_hand(lab, "Node unexpectedly rebooted", state="down", node="dgx-04")
    found = listed(ops)
    assert found["dgx-01"]["advice"].startswith("It did not pass. See the burn-in's results")
    assert found["dgx-02"]["advice"] == "It returns when its maintenance ends."
    page = signed_in(ops).get("/drains").text
    assert "is drained after a burn-in since" in page
    assert "is drained for maintenance since" in page
    assert "; it is unknown who or what took it out of service: <b>water leak</b>" in page
    assert "is down (reason set by Slurm) since" in page


def test_a_persons_drain_over_vigil_is_that_persons(lab: Lab, ops: User) -> None:
    drain.request_order(ops, Node.objects.get(name="dgx-01"), NodeOrder.Action.DRAIN, "fan 3")
    lab.step()
    (item,) = listed(ops).values()
    assert (item["holder"], item["holder_name"], item["reason"]) == ("person", "ops", "fan 3")
    assert item["advice"] == "Ask ops."


def test_a_rules_reason_is_over_once_its_findings_are_cleared(lab: Lab, ops: User, settings: Any) -> None:
    lab.xid(79)
    lab.step()
    settings.VIGIL_HEALTH = "propose"  # nothing returns by itself
    inbox.clear(ops, lab.entry().pk, "reseated")
    item = listed(ops)["dgx-01"]
    assert (item["standing"], item["facts"]) == ("over", ["its findings are cleared"])
    assert "The problem is gone on" in signed_in(ops).get("/drains").text
    now = timezone.now()
    maintenance.plan(ops, "dgx-01", "new fan", now - timedelta(minutes=1), now + timedelta(hours=1))
    lab.xid(119)
    lab.step()
    item = listed(ops)["dgx-01"]
    assert (item["standing"], len(item["entries"])) == ("stands", 2), "not decided yet, and not over"
    assert item["advice"].startswith("See the finding")


def test_an_approved_drain_is_the_rules(lab: Lab, ops: User, settings: Any) -> None:
    settings.VIGIL_HEALTH = "propose"
    lab.xid(79)
    lab.step()
    entry = inbox.approve(ops, lab.entry().pk, "board ordered")
    lab.step()
    item = listed(ops)["dgx-01"]
    assert [item[name] for name in ("holder", "holder_name", "approved_by", "standing", "entries")] == [
        "rule", "off-bus", "ops", "stands", [entry.pk],
    ]  # fmt: skip
    assert item["reason"] == "[node] Xid 79 on GPU 0: off-bus"
    assert "Once it has cleared, return the node" in item["advice"]
    page = signed_in(ops).get("/drains").text
    assert "by Vigil’s rule off-bus, approved by ops" in page
    assert f"/health/entries?node=dgx-01#entry-{entry.pk}" in page
    assert "agreed that it returns" not in page
    inbox.clear(ops, entry.pk, "reseated")
    assert listed(ops)["dgx-01"]["standing"] == "over"
    assert "return it to service" in signed_in(ops).get("/drains").text


def test_kill_task_failed_is_over_once_the_process_is_gone(lab: Lab, ops: User) -> None:
    by_hand(lab, "Kill task failed")
    assert listed(ops)["dgx-01"]["standing"] == "unknown", "no agent reports"
    machine = lab.machine()
    now = int(time.time())
    machine.post(machine.batch(now - 20, host={"blocked_processes": 2}))
    assert listed(ops)["dgx-01"]["facts"] == ["2 processes blocked (state D)".replace("2 p", "2\N{NO-BREAK SPACE}p")]
    assert listed(ops)["dgx-01"]["standing"] == "stands"
    machine.post(machine.batch(now - 10, host={"blocked_processes": 0}))
    item = listed(ops)["dgx-01"]
    assert (item["standing"], item["facts"]) == ("over", ["no process is blocked or left on a GPU"])


def test_kill_task_failed_is_over_after_a_reboot(lab: Lab, ops: User) -> None:
    by_hand(lab, "Kill task failed", booted_at=time.time() - 60)
    item = listed(ops)["dgx-01"]
    assert item["standing"] == "over"
    assert item["facts"][0].startswith("rebooted since")


def test_what_does_not_respond_is_over_once_it_does(lab: Lab, ops: User) -> None:
    by_hand(lab, "Not responding", by="slurm", state="down")
    assert listed(ops)["dgx-01"]["standing"] == "stands"
    lab.machine()
    assert "the machine is up: its agent reports. Check slurmd" in listed(ops)["dgx-01"]["facts"]
    by_hand(lab, "Not responding", by="slurm", state="drained")
    assert listed(ops)["dgx-01"]["standing"] == "over"


def test_missing_gpus_are_counted_again(lab: Lab, ops: User) -> None:
    by_hand(lab, "gres/gpu count reported lower than configured (1 < 2)", by="slurm", gpus=2)
    machine = lab.machine()
    assert listed(ops)["dgx-01"]["standing"] == "over"
    machine.gpus = machine.gpus[:1]
    machine.post(machine.facts(time.time()))
    item = listed(ops)["dgx-01"]
    assert (item["standing"], item["facts"]) == ("stands", ["1 of 2 GPUs is present"])


def test_a_replaced_gpu_and_a_reloaded_driver_are_facts(lab: Lab, ops: User) -> None:
    machine = lab.machine()
    by_hand(lab, "RMA 4711", by="mira", ago=-1)
    later = time.time() + 5
    machine.gpus = (machine.gpus[0], "GPU-new")
    machine.post(machine.facts(later))
    machine.post(machine.event("driver.reloaded", later + 1, driver="570.99"))
    facts = listed(ops)["dgx-01"]["facts"]
    assert "GPU 1 was replaced" in facts
    assert any(fact.startswith("NVIDIA driver reloaded") for fact in facts)


def test_costs_money_where_a_price_is_set(lab: Lab, ops: User, settings: Any) -> None:
    settings.VIGIL_GPU_HOUR_PRICE = 2.5
    by_hand(lab, "fan", by="mira", gpus_used=1, cpus_used=8, state="draining")
    item = listed(ops)["dgx-01"]
    assert (item["idle_gpus"], item["cost_per_hour"], item["has_jobs"]) == (1, 2.5, True)
    assert item["advice"] == "Wait until its jobs have ended before you repair it."
    assert "€2.50 an hour" in signed_in(ops).get("/drains").text


def test_people_read_and_only_sysadmins_undrain(lab: Lab, ops: User) -> None:
    by_hand(lab, "fan", by="mira")
    ada = person("ada", a_project())
    page = signed_in(ada).get("/drains").text
    assert "fan" in page
    assert "Undrain" not in page
    answer = signed_in(ops).post("/nodes/dgx-01/undrain", {"next": "drains", "replaces": "fan"})
    assert (answer.status_code, answer["Location"]) == (302, "/drains")
    assert "by ops. Sent to the scheduler" in signed_in(ops).get("/drains").text


def test_a_hostile_reason_is_text(lab: Lab, ops: User) -> None:
    by_hand(lab, "<script>alert(1)</script>", by="<b>mira</b>")
    page = signed_in(ops).get("/drains").text
    assert "<script>alert" not in page
    assert "<b>mira" not in page


def test_the_page_states_that_all_nodes_are_in_service(lab: Lab, ops: User) -> None:
    page = signed_in(ops).get("/drains").text
    assert "All nodes are in service." in page
    assert bearer(ops, "read").get("/api/v1/drains").json()["items"] == []


def test_a_list_of_any_length_takes_the_same_queries(lab: Lab, ops: User, django_assert_max_num_queries: Any) -> None:
    Node.objects.bulk_create(
        [
            Node(name=f"n{number:04}", state="drained", reason="fan", reason_at=datetime.now(UTC), gpus=8)
            for number in range(600)
        ]
    )
    client = bearer(ops, "read")
    with django_assert_max_num_queries(40):
        answer = client.get("/api/v1/drains", {"limit": 200}).json()
    assert len(answer["items"]) == 200
    after = client.get("/api/v1/drains", {"limit": 200, "cursor": answer["next"]}).json()
    assert after["items"][0]["node"] == "n0200"
    spare = {"node": "spare", "partition": "gpu", "state": HotSpare.SpareState.STANDBY, "since": datetime.now(UTC)}
    HotSpare.objects.create(**spare)
    Node.objects.create(name="spare", state="drained", reason="[node] hot spare", reason_by="spare", gpus=1)
    visitor = signed_in(ops)
    with django_assert_max_num_queries(40):
        page = visitor.get("/drains").text
    assert "600 nodes are out of service: 4,800 idle GPUs." in page.replace("\N{NO-BREAK SPACE}", " ")
    assert "stands by since" in page
    assert "The 100 with the most idle GPUs are shown" in page


def test_a_long_list_explains_that_only_the_nodes_shown_are_judged(lab: Lab, ops: User) -> None:
    now = datetime.now(UTC)
    drained = {"state": "drained", "reason": "Kill task failed", "reason_at": now - timedelta(hours=1)}
    Node.objects.bulk_create(
        Node(name=f"n{number:03}", gpus=8 - number // 100, booted_at=now if number in (7, 110) else None, **drained)
        for number in range(120)
    )
    page = signed_in(ops).get("/drains").text.replace("\N{NO-BREAK SPACE}", " ")
    assert "Among the 100 shown, the problem is gone on n007." in page
    Node.objects.filter(name__gte="n090", name__lt="n110").delete()
    page = signed_in(ops).get("/drains").text.replace("\N{NO-BREAK SPACE}", " ")
    assert "The problem is gone on 2 nodes." in page


def test_test_and_return_starts_a_burn_in_that_a_person_agreed_to(lab: Lab, ops: User) -> None:
    by_hand(lab, "fan", by="mira")
    client = signed_in(ops)
    page = client.get("/drains").text
    assert "mira agreed that it returns if it passes" in page
    assert client.post("/burnins/start", {"nodes": "dgx-01", "seconds": "600"}).status_code == 409
    assert not BurnInNode.objects.exists(), "nobody agreed"
    client.post("/burnins/start", {"nodes": "dgx-01", "seconds": "600", "may_undrain": "yes"})
    row = BurnInNode.objects.get()
    page = client.get("/drains").text
    assert f"burn-in {row.burn_in_id}</a>" in page
    assert "Test dgx-01" not in page
