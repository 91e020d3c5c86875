"""Test the wording of machine events, and the charts of a node's page."""

from __future__ import annotations

from typing import Any

import pytest

from nodes.presenting import figures, gpu_fields
from nodes.presenting.events import words


@pytest.mark.parametrize(
    ("kind", "code", "data", "title", "tone"),
    [
        ("xid", 79, {}, "Xid 79: GPU fell off the bus", "failed"),
        ("xid", 999, {}, "Xid 999", "failed"),
        ("sxid", 20034, {}, "SXid 20034", "failed"),
        ("xid", None, {}, "Xid –", "failed"),
        ("mount.slow", None, {"mount": "/data"}, "/data was slow", "warn"),
        ("mount.slow", None, {"mount": 7}, "A shared mount was slow", "warn"),
        ("boot", None, {}, "Booted", "notice"),
        ("something.new", None, {}, "something.new", "warn"),
    ],
)
def test_words(kind: str, code: int | None, data: dict[str, Any], title: str, tone: str) -> None:
    report = words(kind, code, "", data)
    assert (report.title, report.tone) == (title, tone)


def test_the_kernel_message_is_the_detail() -> None:
    assert words("xid", 79, "NVRM: Xid", {}).detail == "NVRM: Xid"
    assert "discarded 3 batches" in words("agent.gap", None, "", {"batches": 3}).detail.replace("\xa0", " ")


def test_the_charts_of_a_gpu_have_its_limits() -> None:
    drawn = {item["id"]: item for item in figures.of_gpu("GPU-1", 3, memory_mib=81_920, slowdown_c=87, cap_watts=700)}
    assert list(drawn) == [f"gpu-3-{field.name}" for field in gpu_fields.FIELDS]
    assert drawn["gpu-3-memory_mib"]["y"] == [0, 80.0]
    assert drawn["gpu-3-temperature_c"]["limits"] == [{"label": "", "value": 87}]
    assert drawn["gpu-3-watts"]["limits"] == [{"label": "", "value": 700}]
    assert drawn["gpu-3-watts"]["unit"] == "W of 700"
    bare = figures.of_gpu("GPU-1", 3)[2]
    assert (bare["limits"], bare["unit"]) == ([], "°C")
    assert [field.number(61.6) for field in gpu_fields.FIELDS] == ["62", "0.1", "62", "62"]
    assert gpu_fields.FIELDS[0].number(None) == "–"


def test_the_charts_of_a_machine_are_those_of_its_series() -> None:
    names = ["cpu_percent", "memory_used_mib", "net_rx_mib:eth0", "net_tx_mib:eth0", "mount_ms:/data", "uptime_s"]
    names += [f"ib_{way}_mib:mlx5_{i}/1" for i in range(4) for way in ("rx", "tx")]
    drawn = {item["id"]: item for item in figures.of_host(names, cpus=224, memory_mib=2_064_384)}
    assert list(drawn) == ["cpu", "memory", "network", "mounts"]
    network = drawn["network"]
    assert [line["label"] for line in network["series"]] == [
        "mlx5_0/1 in", "mlx5_0/1 out", "mlx5_1/1 in", "mlx5_1/1 out", "mlx5_2/1 in",
    ]  # fmt: skip
    assert network["unit"] == "MiB per second; 5 more are not shown"
    assert drawn["memory"]["limits"] == [{"label": "all", "value": 2016.0}]
    assert figures.of_host([], cpus=None, memory_mib=None) == []
