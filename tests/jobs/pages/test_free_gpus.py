"""Test that the number of free GPUs is the same on every page and endpoint and in /metrics."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from nodes.models import Agent, Gpu, Node
from tests.lab import signed_in, sysadmin

TOKEN = "for-this-test"
# Of 8 GPUs each: state, allocated, and how many the agent sees as lost, hot, or busy without an allocation.
NODES = {
    "idle": ("idle", 0, "", 8),
    "mixed": ("mixed", 3, "", 5),
    "with-a-lost-gpu": ("mixed", 2, "lost", 6),
    "with-a-hot-gpu": ("idle", 0, "hot", 8),
    "with-a-stray-process": ("idle", 0, "stray", 8),
    "drained": ("drained", 0, "", 0),
    "rebooting": ("reboot", 0, "", 0),
    "overcommitted": ("allocated", 9, "", 0),
}
USED = 3 + 2 + 8
FREE, TOTAL = sum(free for *_, free in NODES.values()), 8 * len(NODES)


@pytest.fixture
def cluster(db: None) -> None:
    """The nodes above, and a machine that has GPUs and an agent but is no node of the scheduler's."""
    now = timezone.now()
    for name, (state, used, oddity, _) in NODES.items():
        Node.objects.create(name=name, state=state, cpus=64, gpus=8, gpus_used=used, partitions=["h100"])
        add_agent(name, oddity)
    add_agent("outside", "")
    Agent.objects.update(heard_at=now)


def add_agent(node: str, oddity: str) -> None:
    odd = {"hot": {"temperature_c": 95}, "stray": {"gpu_percent": 80}}.get(oddity, {})
    newest = {f"GPU-{node}-{index}": {"temperature_c": 40, **odd} for index in range(8)}
    agent = Agent.objects.create(node=node, newest={"gpus": newest})
    Gpu.objects.bulk_create(Gpu(uuid=uuid, agent=agent, index=index) for index, uuid in enumerate(newest))
    if oddity == "lost":
        Gpu.objects.filter(agent=agent, index=7).update(lost_at=timezone.now())


def fact(html: str, title: str) -> str:
    """The value of one of the figures on top of a page."""
    found = re.search(rf"<dt[^>]*>{title}</dt>\s*<dd[^>]*>(?:<a[^>]*>)?\s*([\d,]+)", html)
    assert found, f"no {title} in {html}"
    return found[1].replace(",", "")


@pytest.mark.usefixtures("cluster")
def test_every_door_counts_the_same(settings: Any) -> None:
    settings.VIGIL_METRICS_TOKEN = TOKEN
    client = signed_in(sysadmin())
    for page in ("/cluster", "/nodes"):
        html = client.get(page).text
        assert fact(html, "Free") == str(FREE), page
        assert fact(html, "In use") == str(USED), page
        assert f"of {TOTAL}\N{NO-BREAK SPACE}GPUs" in html, page
    assert f"{FREE} of {TOTAL}\N{NO-BREAK SPACE}GPUs:" in client.get("/").text
    nodes = client.get("/api/v1/nodes").json()["items"]
    assert sum(node["gpus_free"] for node in nodes) == FREE
    scraped = Client().get("/metrics?only=cluster", headers={"Authorization": f"Bearer {TOKEN}"}).text
    assert sum(int(value) for value in re.findall(r"^vigil_node_gpus_free\{.*\} (\d+)$", scraped, re.M)) == FREE
    assert sum(int(value) for value in re.findall(r"^vigil_node_gpus\{.*\} (\d+)$", scraped, re.M)) == TOTAL
