"""The inventory groups what agents report, and marks odd and outdated versions: page, REST and health rules."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from nodes import software_inventory
from nodes.models import Agent, Node
from portal.models import User
from tests.nodes.telemetry.reporting import Machine

pytestmark = pytest.mark.django_db
USUAL: dict[str, Any] = {
    "driver": "570.195.03", "kernel": "Linux 6.8.0-52-generic", "slurm": "24.11.5", "nccl": "2.26.2",
    "adapters": [{"name": "mlx5_0", "board": "MT_0000000838", "firmware": "28.43.2026"}],
}  # fmt: skip


def report(node: str, partition: str = "h100", **more: Any) -> None:
    Node.objects.update_or_create(name=node, defaults={"partitions": [partition], "gpus": 2, "state": "idle"})
    uuids = tuple(f"GPU-{node}-{index}" for index in range(2))
    machine = Machine(node=node, gpus=uuids, stream=uuid.uuid4().hex[:16])
    gpus = [
        {"uuid": name, "index": index, "name": "NVIDIA H100", "vbios": "96.00.89.00.01"}
        for index, name in enumerate(uuids)
    ]
    facts = machine.facts(time.time(), **{**USUAL, "gpus": gpus, **more})
    assert machine.post(facts).status_code == 200


@pytest.fixture
def mira(db: None) -> User:
    return User.objects.create(username="mira")


@pytest.fixture
def cluster(db: None) -> None:
    for number in range(1, 7):
        report(f"dgx-{number:02}")
    report("dgx-07", driver="570.86.15", adapters=[{**USUAL["adapters"][0], "firmware": "28.39.1002"}])


def findings() -> list[tuple[str, str, str, str]]:
    found = software_inventory.read_inventory().findings
    return [(item.node, item.software.name, item.usual, item.minimum.version if item.minimum else "") for item in found]


def test_the_odd_and_the_outdated_version_are_found(cluster: None) -> None:
    assert findings() == [
        ("dgx-07", "driver", "570.195.03", "570.195.03"),
        ("dgx-07", "hca", "28.43.2026", ""),
    ]


def test_nodes_are_compared_with_their_partition_only(cluster: None) -> None:
    for number in range(1, 4):
        report(f"old-{number}", partition="a100", kernel="Linux 5.15.0-91-generic")
    assert "kernel" not in {name for _, name, _, _ in findings()}
    report("dgx-06", kernel="Linux 5.15.0-91-generic")
    assert ("dgx-06", "kernel", "Linux 6.8.0-52-generic", "") in findings()


def test_a_gpu_with_another_vbios_is_found(cluster: None) -> None:
    gpus = [
        {"uuid": f"GPU-dgx-03-{index}", "index": index, "name": "NVIDIA H100", "vbios": f"96.00.{89 + index}.00.01"}
        for index in range(2)
    ]
    report("dgx-03", gpus=gpus)
    assert ("dgx-03", "vbios", "96.00.89.00.01", "") in findings()


def vbios(node: str, *versions: str) -> list[dict[str, Any]]:
    return [
        {"uuid": f"GPU-{node}-{index}", "index": index, "name": "NVIDIA H100", "vbios": version}
        for index, version in enumerate(versions)
    ]


def test_each_node_has_a_single_vote_however_many_gpus_and_adapters_it_reports(cluster: None) -> None:
    report("dgx-01", gpus=vbios("dgx-01", *["ff.00.00.00.01"] * 64))
    many = [{"name": f"mlx5_{number}", "board": "MT_0000000838", "firmware": "1.0"} for number in range(32)]
    report("dgx-02", adapters=many)
    assert [(node, usual) for node, name, usual, _ in findings() if name == "vbios"] == [("dgx-01", "96.00.89.00.01")]
    assert {node for node, name, _, _ in findings() if name == "hca"} == {"dgx-02", "dgx-07"}


def test_fewer_than_three_nodes_are_not_compared_but_the_gpus_of_a_node_are() -> None:
    report("dgx-01", gpus=vbios("dgx-01", *["96.00.89.00.01"] * 8))
    report("dgx-02", gpus=vbios("dgx-02", *["96.00.90.00.01"] * 7, "96.00.89.00.01"))
    assert findings() == [("dgx-02", "vbios", "96.00.90.00.01", "")]


def test_a_node_that_lies_stays_bounded(cluster: None) -> None:
    gpus = [{"uuid": "GPU-x", "index": 0, "name": "N" * 400, "vbios": ["96"]}]
    adapters = [{"name": "x", "board": f"b{number}", "firmware": "1"} for number in range(100)]
    report("dgx-08", driver="<script>alert(1)</script>" + "9" * 400, kernel=5, gpus=gpus, adapters=adapters, slurm=None)
    node = next(node for node in software_inventory.read_inventory().nodes if node.node == "dgx-08")
    assert max(len(version) for versions in node.versions.values() for version in versions) <= 128
    assert sum(item.name == "hca" for item in node.versions) <= 32
    Agent.objects.filter(node="dgx-08").update(facts={"gpus": "no", "adapters": 3, "driver": {}})
    assert "dgx-08" not in {node.node for node in software_inventory.read_inventory().nodes}


def test_the_page(cluster: None, client: Client, mira: User) -> None:
    assert client.get("/inventory").status_code == 302
    client.force_login(mira)
    html = client.get("/inventory").content.decode()
    assert "has software below a minimum version and differs from its peers." in html
    assert "570.86.15" in html
    assert "CVE-2025-23280" in html
    assert "InfiniBand adapter firmware of MT_0000000838" in html


def test_versions_without_a_usual_version_are_reported_as_such(client: Client, mira: User) -> None:
    for number in range(1, 5):
        report(f"dgx-{number:02}", driver="570.195.03" if number > 2 else "580.95.05")
    client.force_login(mira)
    page = client.get("/inventory").content.decode().replace("\N{NO-BREAK SPACE}", " ")
    assert "Nodes have different versions of NVIDIA driver, and none of them is usual." in page
    assert "2 nodes have 570.195.03, 2 nodes have 580.95.05" in page
    assert "All nodes have the versions of their peers." not in page
    (mixed,) = client.get("/api/v1/inventory").json()["mixed"]
    assert (mixed["software"], mixed["partition"], mixed["model"]) == ("driver", "h100", "NVIDIA H100")
    assert mixed["versions"] == [{"version": "570.195.03", "count": 2}, {"version": "580.95.05", "count": 2}]


def test_too_few_peers_are_reported_as_such(client: Client, mira: User) -> None:
    client.force_login(mira)

    def page() -> str:
        return client.get("/inventory").content.decode().replace("\N{NO-BREAK SPACE}", " ")

    report("dgx-01")
    report("dgx-02")
    assert "No node has enough peers to compare its versions with." in page()
    report("dgx-03")
    assert "All nodes have the versions of their peers." in page()
    report("old-1", partition="a100")
    assert "Nodes have the versions of their peers; 1 node has too few peers to compare with." in page()


def test_a_branch_without_a_minimum_is_marked(client: Client, mira: User) -> None:
    report("dgx-01", driver="590.48.01")
    client.force_login(mira)
    assert "branch not judged" in client.get("/inventory").content.decode()


def test_the_page_escapes_what_nodes_report(cluster: None, client: Client, mira: User) -> None:
    report("dgx-02", driver="<script>alert(1)</script>")
    client.force_login(mira)
    html = client.get("/inventory").content.decode()
    assert "<script>alert(1)" not in html
    assert "&lt;script&gt;alert(1)" in html


def test_an_empty_page_explains_what_to_do(client: Client, mira: User) -> None:
    client.force_login(mira)
    html = client.get("/inventory").content.decode()
    assert "No node has reported its software yet." in html
    assert 'href="/agents"' in html


def test_a_site_adds_minimums(cluster: None, client: Client, mira: User, settings: Any, tmp_path: Path) -> None:
    path = tmp_path / "minimums.toml"
    path.write_text('[[minimum]]\nsoftware = "nccl"\nversion = "2.27"\nwhy = "hangs"\nsource = "ours"\n')
    settings.VIGIL_MINIMUM_VERSIONS = str(path)
    assert [node for node, name, _, minimum in findings() if minimum == "2.27"] == [
        f"dgx-{number:02}" for number in range(1, 8)
    ]
    path.write_text('[[minimum]]\nsoftware = "nccl"\n')
    client.force_login(mira)
    html = client.get("/inventory").content.decode()
    assert "minimum 1: version is missing" in html
    assert not [node for node, name, _, minimum in findings() if name == "nccl"]


def test_a_file_that_becomes_readable_counts_at_once(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "minimums.toml"
    path.write_text('[[minimum]]\nsoftware = "nccl"\nversion = "2.27"\nwhy = "hangs"\nsource = "ours"\n')
    settings.VIGIL_MINIMUM_VERSIONS = str(path)

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as unreadable:  # mode 000 does not stop root
        unreadable.setattr(Path, "open", refuse)
        assert software_inventory.site_minimums()[1] == f"{path}: Permission denied."
    found, problem = software_inventory.site_minimums()
    assert problem == ""
    assert [minimum.version for minimum in found.items if minimum.is_site] == ["2.27"]


def test_rest_groups_and_lists(cluster: None, client: Client, mira: User) -> None:
    client.force_login(mira)
    found = client.get("/api/v1/inventory").json()
    (driver,) = [group for group in found["items"] if group["software"] == "driver"]
    assert [(version["version"], version["count"]) for version in driver["versions"]] == [
        ("570.195.03", 6),
        ("570.86.15", 1),
    ]
    assert driver["versions"][1]["odd"] == ["dgx-07"]
    assert driver["versions"][1]["minimum"]["why"].startswith("CVE-2025-23280")
    first = client.get("/api/v1/inventory/nodes?limit=4").json()
    rest = client.get(f"/api/v1/inventory/nodes?limit=4&cursor={first['next']}").json()
    assert [row["node"] for row in first["items"] + rest["items"]] == [f"dgx-{number:02}" for number in range(1, 8)]
    (odd,) = client.get("/api/v1/inventory/nodes?software=driver&version=570.86.15").json()["items"]
    assert odd["node"] == "dgx-07"


def facts_queries(client: Client, address: str) -> list[str]:
    """Return the queries that read agents' facts for this answer."""
    with CaptureQueriesContext(connection) as queries:
        assert client.get(address).status_code == 200
    return [query["sql"] for query in queries if '"nodes_agent"."facts"' in query["sql"].partition(" FROM ")[0]]


def test_a_page_of_nodes_reads_the_facts_of_these_nodes_only(cluster: None, client: Client, mira: User) -> None:
    client.force_login(mira)
    (sql,) = facts_queries(client, "/api/v1/inventory/nodes?limit=2")
    assert '"nodes_agent"."id" IN (' in sql


def test_facts_are_parsed_once_in_half_a_minute(
    cluster: None, client: Client, mira: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software_inventory, "CACHE_S", 1e9)
    software_inventory.recent_inventory()
    client.force_login(mira)
    for address in ("/inventory", "/api/v1/inventory", "/api/v1/inventory/nodes?software=kernel&limit=1"):
        assert [sql for sql in facts_queries(client, address) if '"nodes_agent"."id" IN (' not in sql] == []
