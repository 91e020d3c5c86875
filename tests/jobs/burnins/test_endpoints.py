"""Burn-ins over REST and on pages: for sysadmins only, and safe against odd input."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from nodes.models import BurnIn, BurnInNode, BurnInTest, GoldenRecord
from tests.jobs.burnins.simulated_cluster import SimulatedCluster, good_lines, line
from tests.lab import person, signed_in

pytestmark = pytest.mark.django_db


@pytest.fixture
def client(cluster: SimulatedCluster) -> Client:
    return signed_in(cluster.user)


def post(client: Client, address: str = "", **body: Any) -> Any:
    return client.post(f"/api/v1/burnins{address}", body, content_type="application/json")


def test_over_rest(cluster: SimulatedCluster, client: Client) -> None:
    response = post(client, nodes=["dgx-01"], seconds=60)
    assert (response.status_code, response.json()["state"]) == (201, "waiting"), response.content
    assert post(client, nodes=["dgx-01"]).status_code == 409
    cluster.burn_in = BurnIn.objects.get()
    cluster.until_running()
    cluster.write([*good_lines()[:-1], line("memory", "GPU 1", outcome="failed", detail="12 words <b>differ</b>")])
    cluster.tick()
    running = client.get(f"/api/v1/burnins/{cluster.burn_in.pk}").json()
    assert 0 <= running["progress"] <= 1
    assert (running["nodes"][0]["tests"], running["nodes"][0]["failures"]) == (14, 1)
    assert post(client, f"/{cluster.burn_in.pk}/cancel").status_code == 200
    cluster.end_job("cancelled")
    cluster.until_ended()
    assert post(client, f"/{cluster.burn_in.pk}/cancel").status_code == 409
    listed = client.get("/api/v1/burnins?state=ended&node=dgx-01").json()["items"]
    assert [(row["id"], row["nodes"][0]["verdict"]) for row in listed] == [(cluster.burn_in.pk, "failed")]
    detail = client.get(f"/api/v1/burnins/{cluster.burn_in.pk}/nodes/dgx-01").json()
    copies = [(item["item"], item["value"], item["peers"]) for item in detail["results"] if item["value"] == 24.8]
    assert copies == [("host to GPU 0", 24.8, 24.8), ("host to GPU 1", 24.8, 24.8)]
    assert client.get(f"/api/v1/burnins/{cluster.burn_in.pk}/nodes/dgx-02").status_code == 404
    assert client.get("/api/v1/burnins/999").status_code == 404
    page = client.get(f"/burnins/{cluster.burn_in.pk}")
    assert page.status_code == 200
    assert "12 words &lt;b&gt;differ" in page.content.decode()


@pytest.mark.parametrize(
    "body",
    [{}, {"nodes": []}, {"nodes": ["dgx-01"], "seconds": 59}, {"nodes": ["dgx-01; reboot"]}, {"nodes": ["dgx-99"]},
     {"nodes": ["dgx-01"] * 300}, {"nodes": ["dgx-01"], "seconds": 172_801}, {"nodes": ["dgx-01"], "force": True}],
)  # fmt: skip
def test_refuses_over_rest(client: Client, body: dict[str, Any]) -> None:
    refused = post(client, **body)
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:vigil:problem:invalid")
    assert not BurnIn.objects.exists()


def test_a_persons_drain_over_rest(cluster: SimulatedCluster, client: Client) -> None:
    cluster.lab.scheduler.drain("dgx-01", "fan 3")
    cluster.read_nodes()
    refused = post(client, nodes=["dgx-01"])
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:vigil:problem:drained")
    assert post(client, nodes=["dgx-01"], may_undrain=True).status_code == 201


def test_only_for_sysadmins(cluster: SimulatedCluster) -> None:
    cluster.start()
    mira = person("mira")
    client = Client()
    client.force_login(mira)
    address = f"/{cluster.burn_in.pk}"
    assert post(client, nodes=["dgx-02"]).status_code == 403
    assert post(client, f"{address}/cancel").status_code == 403
    assert post(client, "/golden/reset", model="H100").status_code == 403
    for place in ("", address, f"{address}/nodes/dgx-01", "/golden"):
        assert client.get(f"/api/v1/burnins{place}").status_code == 403
    for place in ("", address):
        assert client.get(f"/burnins{place}").status_code == 403
    assert client.post("/burnins/start", {"nodes": "dgx-02"}).status_code == 403
    assert client.post(f"/burnins{address}/cancel").status_code == 403
    assert BurnIn.objects.get().cancel_requested_at is None


def test_on_pages(cluster: SimulatedCluster, client: Client) -> None:
    assert "No burn-ins yet" in client.get("/burnins").content.decode()
    response = client.post("/burnins/start", {"nodes": "dgx-01, dgx-02", "seconds": "60"})
    cluster.burn_in = BurnIn.objects.get()
    assert response.headers["Location"] == f"/burnins/{cluster.burn_in.pk}"
    cluster.until_running()
    assert "Cancel the burn-in" in client.get(f"/burnins/{cluster.burn_in.pk}").text
    for node in ("dgx-01", "dgx-02"):
        cluster.write(good_lines(), node)
    cluster.end_job()
    cluster.until_ended()
    page = client.get(f"/burnins/{cluster.burn_in.pk}?node=dgx-02").content.decode()
    assert "2 passed" in page
    assert '<span class="sr">passed: </span>' in page, "a glyph alone is not read out"
    assert "Cancel the burn-in" not in page
    assert "700" in page
    listed = client.get("/burnins").content.decode()
    assert "2 passed" in listed
    assert GoldenRecord.objects.exists()
    client.post("/burnins/golden", {"model": "NVIDIA H100", "driver": "570.1"})
    assert not GoldenRecord.objects.exists()
    assert client.get("/burnins?after=nonsense").status_code == 200, "the first page"
    assert "/burnins?node=dgx-01" in client.get("/nodes/dgx-01").content.decode()


def test_host_expressions(cluster: SimulatedCluster, client: Client) -> None:
    assert client.post("/burnins/start", {"nodes": "dgx-[01-02,04] dgx-03", "seconds": "60"}).status_code == 302
    names = BurnIn.objects.get().nodes.order_by("node").values_list("node", flat=True)
    assert list(names) == ["dgx-01", "dgx-02", "dgx-03", "dgx-04"]
    started = post(client, nodes=["dgx-[05-06]", "dgx-08"], seconds=60)
    assert [node["node"] for node in started.json()["nodes"]] == ["dgx-05", "dgx-06", "dgx-08"]
    assert post(client, nodes=["dgx-[05"]).status_code == 422
    assert client.post("/burnins/start", {"nodes": "[1]" * 6_000, "seconds": "60"}).status_code == 422


def test_a_refused_form_is_shown_again(cluster: SimulatedCluster, client: Client) -> None:
    refused = client.post("/burnins/start", {"nodes": "dgx-[01", "seconds": "60", "may_undrain": "on"})
    page = refused.content.decode()
    assert refused.status_code == 422
    assert 'value="dgx-[01"' in page
    assert '<option value="60" selected>' in page
    assert 'name="may_undrain" checked' in page
    unknown = client.post("/burnins/start", {"nodes": "dgx-99", "seconds": "60"}).content.decode()
    assert "<code>vigil nodes</code> lists nodes." in unknown
    cluster.lab.scheduler.drain("dgx-01", "fan 3")
    cluster.read_nodes()
    drained = client.post("/burnins/start", {"nodes": "dgx-[01-02]", "seconds": "60"})
    assert drained.status_code == 409
    assert "Tick the box to agree." in drained.content.decode()
    assert 'value="dgx-[01-02]"' in drained.content.decode()
    assert client.get("/burnins/start").headers["Location"] == "/burnins"
    assert not BurnIn.objects.exists()


def test_the_list_counts_inconclusive_nodes(cluster: SimulatedCluster, client: Client) -> None:
    cluster.start("dgx-01", "dgx-02", "dgx-03")
    for node, verdict in zip(("dgx-01", "dgx-02", "dgx-03"), ("passed", "inconclusive", "inconclusive"), strict=True):
        BurnInNode.objects.filter(node=node).update(verdict=verdict)
    BurnIn.objects.update(state="ended")
    assert "1 passed, 2 inconclusive" in client.get("/burnins").content.decode()


def test_the_list_takes_as_many_queries_for_many_nodes(
    cluster: SimulatedCluster, client: Client, django_assert_max_num_queries: Any
) -> None:
    for number in range(1, 13):
        cluster.start(f"dgx-{number:02}")
    with django_assert_max_num_queries(25):
        client.get("/burnins")
    with django_assert_max_num_queries(15):
        client.get("/api/v1/burnins")


def test_the_page_of_the_list_counts_no_tests(cluster: SimulatedCluster, client: Client) -> None:
    """256 nodes have some 85,000."""
    cluster.start("dgx-01", "dgx-02")
    with CaptureQueriesContext(connection) as queries:
        assert f'href="/burnins/{cluster.burn_in.pk}"' in client.get("/burnins").text
    assert not [query["sql"] for query in queries if BurnInTest._meta.db_table in query["sql"]]


def test_rest_lists_at_most_twenty_burn_ins_at_once(cluster: SimulatedCluster, client: Client) -> None:
    BurnIn.objects.bulk_create(BurnIn(key=str(number), seconds=60, state="ended") for number in range(25))
    first = client.get("/api/v1/burnins?limit=200").json()
    rest = client.get(f"/api/v1/burnins?limit=200&cursor={quote(first['next'])}").json()
    assert [len(first["items"]), len(rest["items"]), rest["next"]] == [20, 5, None]
