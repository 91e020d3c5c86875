"""The inventory groups what agents report, and marks odd and outdated versions: page, REST and health rules."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from nodes.models import Agent, Node
from nodes.monitoring import software
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
    found = software.read_inventory().findings
    return [(item.node, item.software.name, item.usual, item.minimum.version if item.minimum else "") for item in found]


def test_the_odd_one_out_and_the_outdated_version_are_found(cluster: None) -> None:
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


def test_one_gpu_with_another_vbios_is_found(cluster: None) -> None:
    gpus = [
        {"uuid": f"GPU-dgx-03-{index}", "index": index, "name": "NVIDIA H100", "vbios": f"96.00.{89 + index}.00.01"}
        for index in range(2)
    ]
    report("dgx-03", gpus=gpus)
    assert ("dgx-03", "vbios", "96.00.89.00.01", "") in findings()


def test_a_node_that_lies_stays_bounded(cluster: None) -> None:
    gpus = [{"uuid": "GPU-x", "index": 0, "name": "N" * 400, "vbios": ["96"]}]
    adapters = [{"name": "x", "board": f"b{number}", "firmware": "1"} for number in range(100)]
    report("dgx-08", driver="<script>alert(1)</script>" + "9" * 400, kernel=5, gpus=gpus, adapters=adapters, slurm=None)
    node = next(node for node in software.read_inventory().nodes if node.node == "dgx-08")
    assert max(len(version) for versions in node.versions.values() for version in versions) <= 128
    assert sum(item.name == "hca" for item in node.versions) <= 32
    Agent.objects.filter(node="dgx-08").update(facts={"gpus": "no", "adapters": 3, "driver": {}})
    assert "dgx-08" not in {node.node for node in software.read_inventory().nodes}


def test_the_page(cluster: None, client: Client, mira: User) -> None:
    assert client.get("/inventory").status_code == 302
    client.force_login(mira)
    html = client.get("/inventory").content.decode()
    assert "has software below a minimum version and differs from its peers." in html
    assert "570.86.15" in html
    assert "CVE-2025-23280" in html
    assert "InfiniBand adapter firmware of MT_0000000838" in html


def test_the_page_escapes_what_nodes_report(cluster: None, client: Client, mira: User) -> None:
    report("dgx-02", driver="<script>alert(1)</script>")
    client.force_login(mira)
    html = client.get("/inventory").content.decode()
    assert "<script>alert(1)" not in html
    assert "&lt;script&gt;alert(1)" in html


def test_an_empty_page_says_what_to_do(client: Client, mira: User) -> None:
    client.force_login(mira)
    html = client.get("/inventory").content.decode()
    assert "No node has reported its software yet." in html
    assert 'href="/agents"' in html


def test_a_site_adds_its_own_minimums(cluster: None, client: Client, mira: User, settings: Any, tmp_path: Path) -> None:
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
