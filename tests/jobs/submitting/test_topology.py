"""Test that the dry run compares tensor parallelism with the NVLinks that agents measured."""

from __future__ import annotations

import pytest

from jobs.spec import JobSpec
from jobs.submitting.topology import nvlink_islands, warnings
from nodes.models import Agent, Node, Partition


def matrix(*islands: int) -> list[list[str]]:
    owners = [number for number, size in enumerate(islands) for _ in range(size)]
    return [
        ["X" if a == b else "NV12" if owners[a] == owners[b] else "SYS" for b in range(len(owners))]
        for a in range(len(owners))
    ]


@pytest.mark.parametrize(
    ("islands", "found"), [((8,), [8]), ((4, 4), [4, 4]), ((1, 1, 1), [1, 1, 1]), ((2, 4), [4, 2])]
)
def test_islands(islands: tuple[int, ...], found: list[int]) -> None:
    assert nvlink_islands(matrix(*islands)) == found


@pytest.mark.parametrize("reported", [None, [], "NV18", [["X"]], [["X", "NV1"]], [[1, 2], [3, None]]])
def test_odd_reports_are_no_measurement(reported: object) -> None:
    assert nvlink_islands(reported) in ([], [1, 1])


def spec(tensor: int, **resources: object) -> JobSpec:
    language = {"heads": 8}
    run = {"recipe": "language", "steps": 10, "parallelism": "tensor", "mesh": {"tp": tensor}, "language": language}
    return JobSpec.parse({"name": "wren", "run": run, "resources": {"gpus_per_node": 8, **resources}})


@pytest.mark.django_db
def test_names_the_nodes_with_links_that_are_too_short() -> None:
    for name, islands in (("dgx-01", (8,)), ("dgx-02", (4, 4)), ("dgx-03", (4, 4)), ("pcie-01", (1,) * 8)):
        Node.objects.create(name=name)
        Agent.objects.create(node=name, facts={"topology": matrix(*islands)})
    Partition.objects.create(name="old", nodes=["dgx-02"])
    assert warnings(spec(8)) == [
        "mesh.tp = 8 needs 8-way NVLink; dgx-02 and dgx-03 have 4 + 4.",
        "mesh.tp = 8 needs 8-way NVLink; pcie-01 has no NVLink.",
    ]
    assert len(warnings(spec(4, gpus_per_node=4))) == 1
    assert warnings(spec(8, require_nodes=["dgx-01"])) == []
    assert len(warnings(spec(8, partition="old"))) == 1
