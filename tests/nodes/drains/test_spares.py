"""A hot spare stays drained, takes the place of a node that failed, and the repaired node is the next spare."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from nodes.cluster import drain, sync
from nodes.cluster.service_state import service_state
from nodes.drains import maintenance, spares
from nodes.models import BurnIn, BurnInNode, HealthControl, HotSpare, Node, NodeOrder, Reading
from nodes.remediation import inbox
from nodes.schedulers.base import SchedulerError
from portal.models import AuditEntry, User
from tests.lab import a_project, bearer, person, signed_in
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
STANDBY = "[node] hot spare (vigil: spare)"


def named(lab: Lab, ops: User, *names: str) -> None:
    for name in names:
        spares.add(ops, Node.objects.get(name=name), "gpu")
    lab.step()


def set_machine(lab: Lab, name: str, **changes: Any) -> None:
    lab.scheduler.machines = [
        replace(machine, **changes) if machine.name == name else machine for machine in lab.scheduler.machines
    ]
    sync.read(lab.scheduler, Reading.Part.NODES)


def spare() -> HotSpare:
    return HotSpare.objects.get()


def test_is_drained_once_and_is_not_counted_as_out_of_service(lab: Lab, ops: User) -> None:
    named(lab, ops, "dgx-12")
    lab.step()
    assert lab.scheduler.drained == {"dgx-12": STANDBY}
    assert NodeOrder.objects.count() == 1
    cluster = service_state()
    assert (cluster.nodes, len(cluster.partitions["gpu"]), cluster.out) == (11, 11, frozenset())
    page = signed_in(ops).get("/drains").text.replace("\N{NO-BREAK SPACE}", " ")
    assert "All other nodes are in service." in page
    assert "1 hot spare stands by." in page
    lead = signed_in(ops).get("/cluster").text.replace("\N{NO-BREAK SPACE}", " ")
    assert "1 hot spare stands by." in lead
    assert Node.objects.get(name="dgx-12").gpus_free == 0


def test_takes_the_place_of_a_node_that_a_rule_drained_and_they_change_places(lab: Lab, ops: User) -> None:
    named(lab, ops, "dgx-12")
    lab.xid(79)
    lab.step()
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-01"]
    assert (spare().node, spare().state, spare().replaces) == ("dgx-12", "serving", "dgx-01")
    assert AuditEntry.objects.filter(action="spare.in_service", thing="dgx-12", user=None).count() == 1
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-01"], "one for one"
    inbox.clear(ops, lab.entry().pk, "reseated")
    for _ in range(3):
        lab.step()
    assert lab.scheduler.drained == {"dgx-01": STANDBY}
    assert (spare().node, spare().state, spare().replaces) == ("dgx-01", "standby", "")
    count = NodeOrder.objects.count()
    lab.step()
    assert NodeOrder.objects.count() == count, "nothing swings"


def test_takes_the_place_of_a_node_that_went_down_by_itself(lab: Lab, ops: User) -> None:
    named(lab, ops, "dgx-12")
    set_machine(lab, "dgx-02", state="down", reason="new disk", reason_by="mira")
    lab.step()
    assert spare().state == "standby", "a person took it down"
    set_machine(lab, "dgx-02", state="down", reason="Not responding", reason_by="slurm")
    lab.step()
    lab.step()
    assert (spare().state, spare().replaces, lab.scheduler.drained) == ("serving", "dgx-02", {})


@pytest.mark.parametrize("obstacle", ["propose", "tripped", "finding", "partition"])
def test_stays_out_where_it_must_not_act(lab: Lab, ops: User, settings: Any, obstacle: str) -> None:
    named(lab, ops, "dgx-12")
    if obstacle == "propose":
        settings.VIGIL_HEALTH = "propose"
    elif obstacle == "tripped":
        HealthControl.objects.update(tripped_at="2026-01-01T00:00:00Z")
    elif obstacle == "finding":
        lab.xid(79, "dgx-12")
        lab.step()
    else:
        HotSpare.objects.update(partition="other")
    set_machine(lab, "dgx-02", state="down", reason="Not responding", reason_by="slurm")
    lab.step()
    lab.step()
    assert (spare().state, list(lab.scheduler.drained)) == ("standby", ["dgx-12"])


def test_a_spare_in_maintenance_stays_out(lab: Lab, ops: User) -> None:
    named(lab, ops, "dgx-11", "dgx-12")
    now = timezone.now()
    maintenance.plan(ops, "dgx-11", "new switch", now, now + timedelta(hours=1))
    set_machine(lab, "dgx-02", state="down", reason="Not responding", reason_by="slurm")
    lab.step()
    lab.step()
    assert list(lab.scheduler.drained) == ["dgx-11"]


def test_a_spare_whose_order_fails_stands_by_again(lab: Lab, ops: User) -> None:
    named(lab, ops, "dgx-12")
    lab.scheduler.broken_parts["undrain"] = SchedulerError("no answer", permanent=True)
    set_machine(lab, "dgx-02", state="down", reason="Not responding", reason_by="slurm")
    lab.step()
    assert (spare().state, spare().replaces) == ("serving", "dgx-02")
    lab.step()
    assert (spare().state, spare().replaces) == ("standby", ""), "it is drained still"
    NodeOrder.objects.update(asked_at=timezone.now() - timedelta(hours=2))
    del lab.scheduler.broken_parts["undrain"]
    lab.step()
    lab.step()
    assert (spare().replaces, lab.scheduler.drained) == ("dgx-02", {})


def test_a_drain_that_the_rows_do_not_show_yet_is_not_taken_for_undone(lab: Lab, ops: User) -> None:
    spares.add(ops, Node.objects.get(name="dgx-12"), "gpu")
    spares.advance()
    drain.carry_out(lab.scheduler)
    spares.advance()
    assert spare().state == "standby"


def test_a_spare_that_fails_while_it_serves_gives_its_place_to_another(lab: Lab, ops: User) -> None:
    lab.xid(79)
    lab.step()
    named(lab, ops, "dgx-11", "dgx-12")
    lab.step()
    assert HotSpare.objects.get(replaces="dgx-01").node == "dgx-11"
    NodeOrder.objects.update(asked_at=timezone.now() - timedelta(hours=2))
    set_machine(lab, "dgx-11", state="down", reason="Not responding", reason_by="slurm")
    lab.step()
    lab.step()
    assert {row.node: (row.state, row.replaces) for row in HotSpare.objects.all()} == {
        "dgx-11": ("standby", ""), "dgx-12": ("serving", "dgx-01"),
    }  # fmt: skip
    assert list(lab.scheduler.drained) == ["dgx-01"]
    set_machine(lab, "dgx-11", state="idle", reason="", reason_by="")
    lab.step()
    assert lab.scheduler.drained["dgx-11"] == STANDBY, "repaired, it stands by"


def test_a_repaired_node_stays_in_service_if_its_spare_is_out(lab: Lab, ops: User) -> None:
    named(lab, ops, "dgx-12")
    set_machine(lab, "dgx-02", state="down", reason="Not responding", reason_by="slurm")
    lab.step()
    lab.step()
    assert (spare().node, spare().replaces) == ("dgx-12", "dgx-02")
    lab.scheduler.drain("dgx-12", "broken fan")
    set_machine(lab, "dgx-02", state="idle", reason="", reason_by="")
    for _ in range(3):
        lab.step()
    assert (spare().node, spare().state, spare().replaces) == ("dgx-12", "standby", "")
    assert lab.scheduler.drained == {"dgx-12": "broken fan"}


def test_a_spare_that_a_person_undrained_is_replaced_as_any_other_node(lab: Lab, ops: User) -> None:
    named(lab, ops, "dgx-11", "dgx-12")
    node = Node.objects.get(name="dgx-11")
    drain.request_order(ops, node, NodeOrder.Action.UNDRAIN, replaces=node.reason)
    lab.step()
    lab.step()
    set_machine(lab, "dgx-11", state="down", reason="Not responding", reason_by="slurm")
    lab.step()
    lab.step()
    assert (HotSpare.objects.get(replaces="dgx-11").node, lab.scheduler.drained) == ("dgx-12", {})
    set_machine(lab, "dgx-11", state="idle", reason="", reason_by="")
    for _ in range(3):
        lab.step()
    assert (spare().node, lab.scheduler.drained) == ("dgx-11", {"dgx-11": STANDBY})


def test_exchanges_are_limited_an_hour(lab: Lab, ops: User) -> None:
    named(lab, ops, "dgx-11", "dgx-12")
    for name in ("dgx-01", "dgx-02", "dgx-03"):
        set_machine(lab, name, state="down", reason="Not responding", reason_by="slurm")
    for _ in range(3):
        lab.step()
    assert HotSpare.objects.filter(state="serving").count() == 1, "5 % of twelve, but at least one"


def test_what_a_person_undrained_or_drained_stays_so(lab: Lab, ops: User) -> None:
    named(lab, ops, "dgx-12")
    lab.scheduler.undrain("dgx-12")  # with scontrol
    sync.read(lab.scheduler, Reading.Part.NODES)
    lab.step()
    assert (spare().state, spare().replaces, lab.scheduler.drained) == ("serving", "", {})
    spares.remove(ops, spare())
    lab.scheduler.drain("dgx-11", "broken fan")
    sync.read(lab.scheduler, Reading.Part.NODES)
    named(lab, ops, "dgx-11")
    lab.step()
    assert lab.scheduler.drained == {"dgx-11": "broken fan"}


def test_a_person_who_undrains_it_in_vigil_keeps_it_in_service(lab: Lab, ops: User) -> None:
    named(lab, ops, "dgx-12")
    node = Node.objects.get(name="dgx-12")
    drain.request_order(ops, node, NodeOrder.Action.UNDRAIN, replaces=node.reason)
    lab.step()
    lab.step()
    assert (spare().state, lab.scheduler.drained) == ("serving", {})


def test_a_spare_whose_finding_is_over_does_not_serve_meanwhile(lab: Lab, ops: User) -> None:
    named(lab, ops, "dgx-12")
    lab.xid(79, "dgx-12")
    lab.step()
    assert lab.scheduler.drained["dgx-12"].startswith("[node] Xid 79")
    lab.scheduler.requests.clear()
    inbox.clear(ops, lab.entry(node="dgx-12").pk, "reseated")
    lab.step()
    lab.step()
    assert (lab.scheduler.drained, spare().state) == ({"dgx-12": STANDBY}, "standby")
    assert "undrain" not in lab.scheduler.requests
    set_machine(lab, "dgx-02", state="down", reason="Not responding", reason_by="slurm")
    lab.step()
    lab.step()
    assert (spare().replaces, lab.scheduler.drained) == ("dgx-02", {}), "it is ready"


def test_a_node_named_a_spare_during_its_maintenance_stands_by_after_it(lab: Lab, ops: User) -> None:
    now = timezone.now()
    window = maintenance.plan(ops, "dgx-12", "new switch", now, now + timedelta(hours=1))
    lab.step()
    named(lab, ops, "dgx-12")
    lab.scheduler.requests.clear()
    maintenance.cancel(ops, window)
    lab.step()
    lab.step()
    assert (lab.scheduler.drained, spare().state) == ({"dgx-12": STANDBY}, "standby")
    assert "undrain" not in lab.scheduler.requests


def test_a_node_that_is_being_tested_does_not_change_places_yet(lab: Lab, ops: User) -> None:
    named(lab, ops, "dgx-12")
    lab.xid(79)
    lab.step()
    lab.step()
    assert (spare().node, spare().replaces) == ("dgx-12", "dgx-01")
    burn_in = BurnIn.objects.create(key="b1", seconds=60, started_by=ops)
    under_test = BurnInNode.objects.create(burn_in=burn_in, node="dgx-01")
    lab.scheduler.undrain("dgx-01")
    sync.read(lab.scheduler, Reading.Part.NODES)
    lab.step()
    assert (spare().node, spare().replaces) == ("dgx-12", "dgx-01"), "it may fail the tests"
    BurnInNode.objects.filter(pk=under_test.pk).update(is_active=False)
    lab.step()
    assert (spare().node, spare().state) == ("dgx-01", "standby")


def test_removing_undrains_it(lab: Lab, ops: User) -> None:
    named(lab, ops, "dgx-12")
    spares.remove(ops, spare())
    lab.step()
    assert not lab.scheduler.drained
    assert not HotSpare.objects.exists()


def test_removed_before_the_nodes_were_read_again_it_is_undrained(lab: Lab, ops: User) -> None:
    spares.add(ops, Node.objects.get(name="dgx-12"), "gpu")
    spares.advance()
    drain.carry_out(lab.scheduler)
    assert list(lab.scheduler.drained) == ["dgx-12"]
    spares.remove(ops, spare())
    lab.step()
    assert not lab.scheduler.drained


def test_a_spare_with_an_open_finding_is_not_removed(lab: Lab, ops: User, settings: Any) -> None:
    named(lab, ops, "dgx-12")
    settings.VIGIL_HEALTH = "propose"
    lab.xid(79, "dgx-12")
    lab.step()
    answer = post(ops, "/dgx-12/remove")
    assert answer.status_code == 409
    assert answer.json()["detail"].startswith("dgx-12 would return to service with an open finding: ")
    page = signed_in(ops).post("/drains/spares/dgx-12/remove", follow=True).text
    assert "would return to service with an open finding" in page
    assert (spare().state, list(lab.scheduler.drained)) == ("standby", ["dgx-12"])
    inbox.approve(ops, lab.entry(node="dgx-12").pk, "reseat", replaces=STANDBY)
    lab.step()
    spares.remove(ops, spare())
    lab.step()
    assert lab.scheduler.drained["dgx-12"].startswith("[node] Xid 79"), "its finding keeps it out"


def post(user: User, address: str = "", **body: Any) -> Any:
    client = bearer(user, "admin" if user.is_sysadmin else "submit")
    return client.post(f"/api/v1/spares{address}", body, content_type="application/json")


def test_rest_and_page_for_sysadmins_only(lab: Lab, ops: User) -> None:
    ada = person("ada", a_project())
    assert post(ada, node="dgx-12", partition="gpu").status_code == 403
    assert signed_in(ada).post("/drains/spares", {"node": "dgx-12", "partition": "gpu"}).status_code == 403
    for wrong in ({"node": "dgx-99", "partition": "gpu"}, {"node": "dgx-12", "partition": "other"}):
        assert post(ops, **wrong).status_code == 422
        refused = signed_in(ops).post("/drains/spares", wrong)
        assert refused.status_code == 422
        assert f'name="node" value="{wrong["node"]}"' in refused.text
    assert signed_in(ops).get("/drains/spares").status_code == 302
    assert not HotSpare.objects.exists()
    assert post(ops, node="dgx-12", partition="gpu").json()["state"] == "standby"
    assert post(ops, node="dgx-12", partition="gpu").status_code == 422
    assert [item["node"] for item in bearer(ada, "read").get("/api/v1/spares").json()["items"]] == ["dgx-12"]
    assert post(ada, "/dgx-12/remove").status_code == 403
    assert post(ops, "/dgx-12/remove").status_code == 204
    assert post(ops, "/dgx-12/remove").status_code == 404
    assert signed_in(ops).post("/drains/spares", {"node": "dgx-12", "partition": "gpu"}).status_code == 302
    assert "Remove hot spare dgx-12" in signed_in(ops).get("/drains").text
    assert signed_in(ops).post("/drains/spares/dgx-12/remove").status_code == 302
    assert [entry.action for entry in AuditEntry.objects.order_by("pk")].count("spare.added") == 2
