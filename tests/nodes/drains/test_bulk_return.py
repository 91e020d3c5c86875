"""Many nodes return to service by one expression, without ending other people's drains."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nodes.cluster import sync
from nodes.models import NodeOrder, Reading
from portal.models import AuditEntry, User
from tests.lab import a_project, person, signed_in, sysadmin
from tests.nodes.drains.test_bulk import post
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


@pytest.fixture
def lab(ops: User) -> Lab:
    """dgx-01 and dgx-02 are drained by ops, dgx-03 by somebody else."""
    lab = Lab()
    lab.scheduler.drain("dgx-03", "broken fan")
    lab.step()
    post(ops, "", nodes="dgx-[01-02]", reason="new switch")
    lab.step()
    return lab


def test_returns_drains_of_the_sysadmin_and_leaves_those_of_others(lab: Lab, ops: User) -> None:
    found = post(ops, "/return/preview", nodes="dgx-[01-04]").json()
    assert [item["node"] for item in found["yours"]] == ["dgx-01", "dgx-02"]
    assert [(item["node"], item["reason"]) for item in found["by_others"]] == [("dgx-03", "broken fan")]
    assert found["in_service"] == ["dgx-04"]
    answer = post(ops, "/return", nodes="dgx-[01-04]", reason="switch works")
    assert answer.status_code == 202
    outcomes = {item["node"]: (item["order"] or {}).get("action") or item["problem"] for item in answer.json()["items"]}
    assert (outcomes["dgx-01"], outcomes["dgx-02"]) == ("undrain", "undrain")
    assert outcomes["dgx-04"] == "dgx-04 is in service."
    assert "broken fan" in outcomes["dgx-03"]
    lab.step()
    assert lab.scheduler.drained == {"dgx-03": "broken fan"}
    assert AuditEntry.objects.filter(user=ops, action="undrain", detail="switch works").count() == 2
    post(ops, "/return", nodes="dgx-[01-04]", reason="the fan, too", replace=True)
    lab.step()
    assert not lab.scheduler.drained


def test_a_node_that_somebody_set_down_stays_down(lab: Lab, ops: User) -> None:
    down = {"state": "down", "reason": "water leak", "reason_by": "mira"}
    lab.scheduler.machines = [replace(m, **down) if m.name == "dgx-05" else m for m in lab.scheduler.machines]
    sync.read(lab.scheduler, Reading.Part.NODES)
    found = post(ops, "/return/preview", nodes="dgx-05").json()
    assert [item["node"] for item in found["by_others"]] == ["dgx-05"]
    (outcome,) = post(ops, "/return", nodes="dgx-05", reason="x").json()["items"]
    assert (outcome["order"], outcome["problem"]) == (None, "dgx-05 is down, set by mira: water leak.")
    assert "This ends the drain of mira" in signed_in(ops).get("/drains").text
    assert 'id="undrain"' in signed_in(ops).get("/nodes/dgx-05").text


def test_another_sysadmin_ends_none_of_them(lab: Lab, ops: User) -> None:
    answer = post(sysadmin("eva"), "/return", nodes="dgx-[01-02]", reason="mine now")
    assert [item["order"] for item in answer.json()["items"]] == [None, None]
    preview = post(sysadmin("ida"), "/return/preview", nodes="dgx-[01-02]").json()
    assert [item["holder_name"] for item in preview["by_others"]] == ["ops", "ops"]


@pytest.mark.parametrize(
    ("nodes", "message"), [("dgx-[01-99]", "does not know"), ("n[1-9999]", "1,000"), ("x[", "match")]
)
def test_refuses_before_any_order_of_return(lab: Lab, ops: User, nodes: str, message: str) -> None:
    before = NodeOrder.objects.count()
    for address, more in (("/return", {"reason": "x"}), ("/return/preview", {})):
        answer = post(ops, address, nodes=nodes, **more)
        assert answer.status_code == 422
        assert message in answer.json()["errors"][0]["message"]
    assert message in signed_in(ops).get("/drains/return", {"nodes": nodes}).text
    assert NodeOrder.objects.count() == before


def test_only_sysadmins_return_nodes(lab: Lab) -> None:
    ada = person("ada", a_project())
    assert post(ada, "/return", nodes="dgx-01", reason="x").status_code == 403
    assert post(ada, "/return/preview", nodes="dgx-01").status_code == 403
    assert signed_in(ada).get("/drains/return").status_code == 403
    assert signed_in(ada).post("/drains/return", {"nodes": "dgx-01", "reason": "x"}).status_code == 403


def test_the_page_shows_which_drains_end(lab: Lab, ops: User) -> None:
    client = signed_in(ops)
    assert "/drains/return" in client.get("/drains").text
    page = client.get("/drains/return", {"nodes": "dgx-[01-04]"}).text.replace("\N{NO-BREAK SPACE}", " ")
    assert "This undrains 2 nodes." in page
    assert "1 node that somebody else drained stays as it is." in page
    assert "broken fan" in page
    assert client.post("/drains/return", {"nodes": "dgx-[01-04]", "reason": " "}).status_code == 422
    answer = client.post("/drains/return", {"nodes": "dgx-[01-04]", "reason": "done"}, follow=True)
    left = "Requested the return of 2 nodes. Left as they are, because somebody else drained them: dgx-03."
    assert left in answer.text.replace("\N{NO-BREAK SPACE}", " ")
    reasons = client.get("/drains/return", {"nodes": "dgx-[01-04]"}).context["reasons"]
    assert json.loads(reasons) == {"dgx-03": "broken fan"}
    form = {"nodes": "dgx-[01-05]", "reason": "done", "replace": "yes", "replaces": reasons}
    lab.scheduler.drain("dgx-05", "chassis open")
    sync.read(lab.scheduler, Reading.Part.NODES)
    answer = client.post("/drains/return", form)
    assert answer.status_code == 302
    lab.step()
    sync.read(lab.scheduler, Reading.Part.NODES)
    assert lab.scheduler.drained == {"dgx-05": "chassis open"}, "nobody saw that"
