"""A lost GPU is one finding, however it shows: an Xid, a sentence of the driver, NVML, or its absence."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from nodes.agent.kernel_log.aggregation import XidAggregator
from nodes.agent.kernel_log.reader import KernelLog
from nodes.agent.kernel_log.watch import KernelWatch
from nodes.agent.log import StatusLog
from nodes.models import Gpu, HealthEntry, NodeEvent
from nodes.monitoring.evaluate import evaluate
from tests.nodes.agent.running import Kmsg
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db

XID = "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
SENTENCE = "NVRM: GPU 0000:05:00.0: GPU has fallen off the bus."
PROBE = ("nvidia: probe of 0000:05:00.0 failed with error -1", "NVRM: The NVIDIA probe routine failed for 1 device(s).")


@pytest.fixture
def kernel(lab: Lab, tmp_path: Any) -> Callable[..., None]:
    """Return a function that writes lines to the kernel log of dgx-01, which its agent reads and reports."""
    kmsg = Kmsg(tmp_path / "kmsg")
    gpu = lab.machine().gpus[0]
    xids = XidAggregator("b1", lambda bus: gpu if bus == "0000:05:00" else "", 5.0)
    watch = KernelWatch(KernelLog(kmsg.path), xids, StatusLog(), tmp_path)
    watch.open()

    def write(*lines: str) -> None:
        kmsg.append(*lines)
        watch.read()
        machine = lab.machine()
        events = [{**event, "at": time.time()} for event in watch.take()]
        assert machine.post({"at": int(time.time()), "n": 0, "events": events}).status_code == 200

    return write


def findings(lab: Lab) -> list[tuple[str, int | None]]:
    """Return the rule and the GPU's index of every open finding, a minute later."""
    lab.step()
    evaluate(timezone.now() + timedelta(seconds=30))
    evaluate(timezone.now() + timedelta(seconds=40))
    rows = HealthEntry.objects.open().select_related("gpu").order_by("id")
    return [(row.rule, row.gpu.index if row.gpu else None) for row in rows]


def list_gpus(lab: Lab, *places: int) -> None:
    """Let the agent of dgx-01 report that NVML lists only these GPUs."""
    machine = lab.machine()
    facts = machine.facts(time.time())
    gpus = facts["events"][0]["gpus"]
    facts["events"][0]["gpus"] = [gpus[place] for place in places]
    assert machine.post(facts).status_code == 200


@pytest.mark.parametrize("lines", [(XID,), (SENTENCE,), (XID, SENTENCE), (SENTENCE, XID), PROBE, (SENTENCE, *PROBE)])
@pytest.mark.parametrize("nvml", ["nothing", "vanished"])
def test_every_mix_of_signals_is_a_single_finding_of_a_gpu(
    lab: Lab, kernel: Callable[..., None], lines: tuple[str, ...], nvml: str
) -> None:
    kernel(*lines)
    if nvml == "vanished":
        lab.happens("gpu.lost", gpu=lab.machine().gpus[0], reason="vanished")
        list_gpus(lab, 1)
    assert findings(lab) == [("off-bus", 0)]
    what = "Xid 79 on GPU 0" if lines[0] == XID else "GPU fell off the bus on GPU 0"
    assert lab.scheduler.drained == {"dgx-01": f"[node] {what} (vigil: off-bus)"}


def test_an_xid_and_a_gpu_that_nvml_reports_as_lost_are_a_single_finding(lab: Lab) -> None:
    lab.xid(79)
    lab.happens("gpu.lost", gpu=lab.machine().gpus[0])
    assert findings(lab) == [("off-bus", 0)]
    assert lab.scheduler.drained == {"dgx-01": "[node] Xid 79 on GPU 0 (vigil: off-bus)"}


def test_a_gpu_that_vanished_is_a_finding_without_any_other_signal(lab: Lab) -> None:
    lab.machine()
    list_gpus(lab, 1)
    assert findings(lab) == [("off-bus", 0)]


def test_a_gpu_that_comes_back_at_once_is_none(lab: Lab) -> None:
    lab.happens("gpu.lost", gpu=lab.machine().gpus[0])
    lab.step()
    lab.happens("gpu.back", gpu=lab.machine().gpus[0])
    assert findings(lab) == []


def test_all_gpus_gone_are_a_single_finding_about_the_node(lab: Lab) -> None:
    """Then the driver does not start: no GPU is broken."""
    lab.machine()
    list_gpus(lab)
    evaluate()
    evaluate(timezone.now() + timedelta(seconds=40))  # before it counts as silent
    assert [(entry.rule, entry.gpu) for entry in HealthEntry.objects.active()] == [("gpus-missing", None)]


def test_a_gpu_that_was_replaced_is_not_lost(lab: Lab) -> None:
    machine = lab.machine()
    machine.gpus = ("GPU-spare", machine.gpus[1])
    machine.post(machine.facts(time.time()))
    assert Gpu.objects.exclude(gone_at=None).exists()
    assert findings(lab) == []


def test_a_gpu_that_the_scheduler_does_not_expect_any_more_is_not_lost(lab: Lab) -> None:
    lab.machine()
    lab.scheduler.machines = [
        status if status.name != "dgx-01" else replace(status, gpus=1) for status in lab.scheduler.machines
    ]
    lab.step()
    list_gpus(lab, 1)
    assert findings(lab) == []


def test_a_node_of_which_the_scheduler_knows_nothing_counts_what_its_agent_saw_vanish(lab: Lab) -> None:
    lab.machine("spare-1")
    machine = lab.machines["spare-1"]
    machine.post(machine.event("gpu.lost", time.time(), gpu=machine.gpus[0], reason="vanished"))
    facts = machine.facts(time.time())
    del facts["events"][0]["gpus"][0]
    machine.post(facts)
    assert NodeEvent.objects.filter(is_open=True).count() == 0
    assert findings(lab) == [("off-bus", 0)]
