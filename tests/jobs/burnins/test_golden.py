"""Golden records grow by nodes that passed, and only by what does not contradict them."""

from __future__ import annotations

import pytest

from jobs.burnins import golden
from nodes.burnin.evidence import NodeResults
from nodes.burnin.reports import BurnInMachine, ItemSummary
from nodes.models import GoldenRecord
from tests.jobs.burnins.simulated_cluster import BAD, GOOD, H100

pytestmark = pytest.mark.django_db
MACHINE = BurnInMachine("NVIDIA H100", 1, "570.1")


def node(value: float, digest: str = GOOD, machine: BurnInMachine | None = MACHINE) -> NodeResults:
    test = ItemSummary("matrix", "GPU 0", "TFLOP/s", H100, 1, values=[value], digests=[digest])
    return NodeResults("dgx-01", machine, [test], ended=True, expected_gpus=1)


def test_what_contradicts_a_record_does_not_change_it() -> None:
    golden.add([node(700.0)])
    golden.add([node(350.0), node(710.0, BAD), node(690.0)])
    record = GoldenRecord.objects.get()
    assert (record.values, record.digest, record.count) == ([700.0, 690.0], GOOD, 2)


def test_a_node_that_did_not_report_its_model_makes_no_record() -> None:
    for _ in range(2):
        golden.add([node(700.0, machine=None)])
    assert not GoldenRecord.objects.exists()
