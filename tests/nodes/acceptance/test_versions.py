"""Versions below a minimum fail the clause, with the advisory."""

from __future__ import annotations

from nodes.acceptance.versions import versions_clause
from nodes.inventory.minimums import MinimumVersion, MinimumVersions
from nodes.inventory.software import NodeSoftware, read_facts

MINIMUMS = MinimumVersions(
    (MinimumVersion(software="driver", version="550.90.07", why="CVE-2024-0090.", source="NVIDIA 5551"),)
)


def node(name: str, driver: str) -> NodeSoftware:
    return read_facts(name, "", {"driver": driver, "kernel": "Linux 6.8.0"} if driver else {})


def test_names_the_advisory_and_the_nodes() -> None:
    found = versions_clause(
        [node("dgx-01", "550.54.15"), node("dgx-02", "570.86"), node("dgx-03", "550.54.15")], 3, MINIMUMS
    )
    assert found.outcome == "failed"
    assert found.details == (
        "NVIDIA driver 550.54.15 on dgx-01 and dgx-03: at least 550.90.07. CVE-2024-0090. (NVIDIA 5551)",
    )


def test_all_nodes_must_report() -> None:
    assert versions_clause([node("dgx-01", "570.86")], 1, MINIMUMS).outcome == "passed"
    assert versions_clause([node("dgx-01", "570.86"), node("dgx-02", "")], 2, MINIMUMS).outcome == "not checked"
    assert versions_clause([node("dgx-01", "")], 1, MINIMUMS).outcome == "not checked"


def test_software_with_a_minimum_must_be_reported() -> None:
    gpus = {"gpus": [{"name": "NVIDIA H100", "vbios": "96.00"}], "kernel": "Linux 6.8.0"}
    minimums = MinimumVersions(
        tuple(MinimumVersion(software=name, version="1.2", why="", source="") for name in ("driver", "slurm", "nccl"))
    )
    nodes = [
        read_facts("dgx-01", "", gpus | {"driver": "570.86", "slurm": "24.11.5"}),
        read_facts("dgx-02", "", gpus),
        read_facts("cpu-01", "", {"kernel": "Linux 6.8.0", "slurm": "24.11.5"}),
    ]
    found = versions_clause(nodes, 3, minimums)
    assert found.outcome == "not checked"
    assert found.details == ("NVIDIA driver: not reported by dgx-02.", "Slurm: not reported by dgx-02.")
