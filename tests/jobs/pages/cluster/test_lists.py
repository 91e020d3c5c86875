"""Test the lists of the cluster over REST: partitions, licenses, accounts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodes.cluster import sync
from nodes.models import Node
from nodes.schedulers.cluster import AccountsInfo, AssociationInfo, LicenseInfo, Limits, QosInfo
from portal.models import User
from tests.jobs.pages.reading import page_text
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import person, signed_in, sysadmin

pytestmark = pytest.mark.django_db


def test_lists_of_the_cluster(mira: User, scheduler: ScriptedScheduler) -> None:
    client = signed_in(mira)
    found = client.get("/api/v1/partitions").json()["items"]
    assert [(p["name"], p["is_default"], p["state"]) for p in found] == [("gpu", True, "up"), ("cpu", False, "drain")]
    assert client.get("/api/v1/nodes?partition=cpu").json()["items"][0]["name"] == "cpu-01"
    assert [n["name"] for n in client.get("/api/v1/nodes?state=drained").json()["items"]] == ["dgx-02"]
    Node.objects.filter(name="dgx-02").update(state="drained+not_responding")
    assert [n["name"] for n in client.get("/api/v1/nodes?state=drained").json()["items"]] == ["dgx-02"]
    assert "drained and not responding" in client.get("/nodes?state=drained").text
    scheduler.machines = [replace(scheduler.machines[0], state="mixed+drain")]
    sync.read(scheduler)
    assert client.get("/api/v1/nodes/dgx-01").json()["takes_jobs"] is False


def test_licenses_are_on_the_queue_page_where_there_are_any(mira: User, scheduler: ScriptedScheduler) -> None:
    assert "Licenses" not in page_text(mira, "/queue")
    scheduler.licensed = [
        LicenseInfo(name="abaqus", total=1500, used=3),
        LicenseInfo(name="matlab", total=2, used=1, reserved=1),
    ]
    scheduler.unreadable["licenses"] = 1
    sync.read(scheduler)
    html = page_text(mira, "/queue")
    assert "Licenses in use: abaqus 3 of 1,500 · matlab 1 of 2, 1 reserved" in html
    assert "1 license could not be read and is left out." in html
    found = signed_in(mira).get("/api/v1/licenses").json()
    assert found["items"][1] == {
        "name": "matlab", "total": 2, "used": 1, "reserved": 1, "free": 1, "is_made_up": False,
    }  # fmt: skip
    assert found["reading"]["unreadable"] == 1


def test_users_see_only_their_accounts(mira: User, scheduler: ScriptedScheduler) -> None:
    scheduler.accounted = AccountsInfo(
        qos=(QosInfo(name="small", limits=Limits(user={"gres/gpu": 2})),),
        associations=(
            AssociationInfo(account="lab"),
            AssociationInfo(account="lab", user="mira1", fair_share=0.25),
            AssociationInfo(account="lab", user="oskar9"),
        ),
    )
    sync.read(scheduler)
    found = signed_in(mira).get("/api/v1/accounts").json()["items"]
    assert [(a["account"], a["user"], a["fair_share"]) for a in found] == [("lab", "mira1", 0.25)]
    assert len(signed_in(sysadmin()).get("/api/v1/accounts").json()["items"]) == 3
    assert signed_in(person("stranger")).get("/api/v1/accounts").json()["items"] == []
    assert signed_in(mira).get("/api/v1/qos").json()["items"][0]["limits"]["user"] == {"gres/gpu": 2}
    assert signed_in(mira).get("/api/v1/reservations").json()["items"] == []
