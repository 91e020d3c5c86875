"""Each clause about the configuration passes where all is well, and names what is wrong where it fails."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.acceptance.clauses import FAILED, NOT_APPLICABLE, NOT_CHECKED, PASSED, ClauseOutcome, requirements, stored
from nodes.acceptance.configuration import configuration_clauses
from nodes.acceptance.facts import (
    LASTING_LOW,
    GpuPeaks,
    NodeConfiguration,
    merge_peaks,
    read_gpu,
    read_mounts,
    read_topology,
)
from nodes.acceptance.history import ClauseHistory
from tests.nodes.acceptance.nodes import URL, gpu, node


def judged(*nodes: NodeConfiguration, url: str = URL) -> dict[str, ClauseOutcome]:
    return {outcome.key: outcome for outcome in configuration_clauses(nodes, url)}


def test_equal_healthy_nodes_pass_every_clause() -> None:
    found = judged(node("dgx-01"), node("dgx-02", mounts={"/data": "nfs01:/data", "/": "/dev/nvme0n1p2"}))
    assert {key: outcome.outcome for key, outcome in found.items()} == dict.fromkeys(found, PASSED)
    assert found["pcie"].measured == "x16 generation 5 on 4\N{NO-BREAK SPACE}GPUs."
    assert found["topology"].measured == "1 × NV18."
    judged_elsewhere = {clause.key for clause in requirements() if clause.group in ("tests", "failures")} | {"versions"}
    assert set(found) == {clause.key for clause in requirements()} - judged_elsewhere


@pytest.mark.parametrize(
    ("key", "changes", "detail"),
    [
        ("agents", {"is_reporting": False}, "dgx-03: no agent reports."),
        ("gpus", {"gpus": (gpu(),)}, "dgx-03: 1 of 2\N{NO-BREAK SPACE}GPUs."),
        ("gpus", {"gpus": (gpu(), gpu(1, model="NVIDIA A100"))}, "NVIDIA A100 80 GiB: dgx-03."),
        ("gpus", {"scheduler_gpus": 1, "expected_gpus": 1},
         "dgx-03: the scheduler lists 1 of 2\N{NO-BREAK SPACE}GPUs, so jobs cannot use all."),
        ("gpus", {"scheduler_gpus": 0, "expected_gpus": 2, "gpus": ()}, "dgx-03: 0 of 2\N{NO-BREAK SPACE}GPUs."),
        ("driver", {"driver": "550.54"}, "550.54: dgx-03."),
        ("kernel", {"kernel": "Linux 5.15"}, "Linux 5.15: dgx-03."),
        ("vbios", {"gpus": (gpu(), gpu(1, vbios="96.00.01"))}, "96.00.01: dgx-03 GPU 1."),
        ("pcie", {"gpus": (gpu(), gpu(1, pcie_width=8))}, "dgx-03 GPU 1: width x8 of x16."),
        ("pcie", {"gpus": (gpu(), gpu(1, pcie_generation=3))}, "dgx-03 GPU 1: generation 3 of 5 while it works."),
        ("pcie", {"gpus": (gpu(), gpu(1, pcie_generation=4, pcie_generation_most=4))},
         "x16 generation 4: dgx-03 GPU 1."),
        ("nvlinks", {"gpus": (gpu(), gpu(1, nvlinks=(True,) * 17 + (False,)))},
         "dgx-03 GPU 1: 1\N{NO-BREAK SPACE}inactive link of 18."),
        ("nvlinks", {"gpus": (gpu(), gpu(1, nvlinks=(True,) * 12))}, "12 NVLinks: dgx-03 GPU 1."),
        ("nvlinks", {"gpus": (gpu(), gpu(1, nvlinks=()))}, "No NVLinks: dgx-03 GPU 1."),
        ("topology", {"topology": (("X", "SYS"), ("SYS", "X"))}, "1 × SYS: dgx-03."),
        ("ecc", {"gpus": (gpu(), gpu(1, has_ecc=False))}, "dgx-03 GPU 1: ECC is off."),
        ("power", {"gpus": (gpu(), gpu(1, power_cap_watts=500))}, "500 W: dgx-03 GPU 1."),
        ("heat", {"gpus": (gpu(), gpu(1, is_slowed=True))}, "dgx-03 GPU 1: slowed down by heat or power brake."),
        ("mounts", {"mounts": {"/data": "", "/": "/dev/sda1"}}, "dgx-03: /data is not mounted."),
        ("mounts", {"mounts": {"/": "/dev/sda1"}}, "dgx-03: /data is not mounted."),
        ("mounts", {"mounts": {"/data": "nfs02:/data", "/": "/dev/sda1"}}, "/data: nfs02:/data: dgx-03."),
        ("mounts", {"slow_mounts": ("/data",)}, "dgx-03: /data is slow or hangs."),
        ("clock", {"clock_offset_s": -9.0}, "dgx-03: -9.0 s."),
        ("memlock", {"memlock_bytes": 2**26}, "dgx-03: 64.0\N{NO-BREAK SPACE}MiB."),
        ("open_files", {"open_files": 4096}, "dgx-03: 4,096."),
        ("shm", {"shm_bytes": 2**26}, "dgx-03: 64.0\N{NO-BREAK SPACE}MiB."),
        ("tokens", {"has_token": False}, "dgx-03: its agent has no token."),
    ],
)  # fmt: skip
def test_names_what_is_wrong(key: str, changes: dict[str, Any], detail: str) -> None:
    found = judged(node("dgx-01"), node("dgx-02"), node("dgx-03", **changes))[key]
    assert found.outcome == FAILED
    assert detail in found.details


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("driver", {"driver": ""}), ("kernel", {"kernel": ""}), ("vbios", {"gpus": (gpu(), gpu(1, vbios=""))}),
        ("pcie", {"gpus": (gpu(), gpu(1, is_working=False))}), ("heat", {"gpus": (gpu(), gpu(1, is_working=False))}),
        ("power", {"gpus": (gpu(), gpu(1, power_cap_watts=None))}), ("mounts", {"mounts": None}),
        ("clock", {"clock_offset_s": None}), ("memlock", {"memlock_bytes": None}), ("shm", {"shm_bytes": None}),
        ("gpus", {"is_reporting": False, "gpus": ()}), ("nvlinks", {"gpus": (gpu(), gpu(1, nvlinks=None))}),
        ("ecc", {"gpus": (gpu(), gpu(1, has_ecc=None))}),
    ],
)  # fmt: skip
def test_what_a_node_does_not_report_is_not_checked(key: str, changes: dict[str, Any]) -> None:
    assert judged(node("dgx-01"), node("dgx-02", **changes))[key].outcome == NOT_CHECKED


def test_nodes_without_gpus() -> None:
    bare = {"gpus": (), "topology": (), "expected_gpus": 0, "scheduler_gpus": 0, "driver": ""}
    found = judged(node("cpu-01", **bare), node("cpu-02", **bare))
    gpu_clauses = {"gpus", "driver", "vbios", "pcie", "nvlinks", "topology", "ecc", "power", "heat", "memlock"}
    assert {key for key, outcome in found.items() if outcome.outcome == NOT_APPLICABLE} == gpu_clauses
    assert {outcome.outcome for outcome in found.values()} == {NOT_APPLICABLE, PASSED}


@pytest.mark.parametrize(
    ("url", "outcome"),
    [("https://vigil.lab", PASSED), ("http://127.0.0.1:8000", PASSED), ("http://localhost", PASSED),
     ("http://[::1]:8000", PASSED), ("http://[::1]/", PASSED), ("http://vigil.lab", FAILED),
     ("http://127.evil.example", FAILED)],
)  # fmt: skip
def test_encryption(url: str, outcome: str) -> None:
    assert judged(node(), url=url)["encrypted"].outcome == outcome


def test_a_gpu_is_judged_by_its_best_generation_while_it_worked() -> None:
    idle = gpu(0, pcie_generation=1, is_working=False)
    peaks = merge_peaks({}, [idle])
    assert peaks["GPU-0"] == GpuPeaks()
    peaks = merge_peaks(merge_peaks(peaks, [gpu(0)]), [idle])
    assert peaks["GPU-0"] == GpuPeaks(5, is_slowed=False, is_working=True)
    assert idle.with_peaks(peaks["GPU-0"]).pcie_generation == 5


def test_a_link_that_trains_down_under_load_is_not_forgotten() -> None:
    low, peaks = gpu(0, pcie_generation=1), merge_peaks({}, [gpu(0)])
    for _ in range(LASTING_LOW - 1):
        peaks = merge_peaks(merge_peaks(peaks, [low]), [gpu(0, pcie_generation=1, is_working=False)])
    assert low.with_peaks(peaks["GPU-0"]).pcie_generation == 5
    assert merge_peaks(merge_peaks(peaks, [gpu(0)]), [low])["GPU-0"].low_generation is None, "it recovered at once"
    peaks = merge_peaks(peaks, [low])
    assert gpu(0).with_peaks(merge_peaks(peaks, [gpu(0)])["GPU-0"]).pcie_generation == 1


def observe(*times: tuple[float, str]) -> ClauseHistory:
    """Return the history of a clause with these outcomes, each at so many seconds."""
    history, previous = ClauseHistory(), 0.0
    for at, outcome in times:
        history = history.observed(ClauseOutcome("mounts", outcome, "1 mount.", (f"slow at {at:g}.",)), at, previous)
        previous = at
    return history


def test_what_failed_for_five_minutes_of_the_tests_fails_in_the_end() -> None:
    every_minute = [(minute * 60.0, FAILED) for minute in range(1, 7)]
    well = ClauseOutcome("mounts", PASSED, "1 mount.")
    assert observe(*every_minute[:-1], (400.0, PASSED)).applied(well) == well
    found = observe(*every_minute, (400.0, PASSED), (420.0, FAILED)).applied(well)
    assert found.outcome == FAILED
    assert found.details[0].startswith("It failed during the tests, for 5\N{NO-BREAK SPACE}min")
    assert found.details[1] == "slow at 360."
    assert observe((60.0, FAILED), (9_000.0, FAILED)).applied(well) == well, "nobody observed it in between"


def test_counters_without_nvlinks_mean_none_and_no_counters_mean_not_reported() -> None:
    assert read_gpu("GPU-0", 0, {}, {"pcie_width": 16}, {}).nvlinks == ()
    assert read_gpu("GPU-0", 0, {}, {}, {}).nvlinks is None


def test_counters_without_memory_errors_mean_no_ecc_and_no_counters_mean_not_reported() -> None:
    assert read_gpu("GPU-0", 0, {}, {"ecc_uncorrected": 0}, {}).has_ecc is True
    assert read_gpu("GPU-0", 0, {}, {"pcie_width": 16}, {}).has_ecc is False
    assert read_gpu("GPU-0", 0, {}, {}, {}).has_ecc is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
GPU_KEYS = st.sampled_from(("name", "vbios", "memory_mib", "power_cap_watts", "nvlinks", "pcie_width", "throttle"))


@given(facts=st.dictionaries(GPU_KEYS, JSON), newest=JSON, mounts=JSON)
def test_whatever_an_agent_reports_is_judged(facts: dict[str, Any], newest: Any, mounts: Any) -> None:
    report = {"mounts": mounts, "topology": mounts}
    odd = node(
        "dgx-02", gpus=(read_gpu("GPU-9", 0, facts, facts, newest),), mounts=read_mounts(report),
        topology=read_topology(report),
    )  # fmt: skip
    rows = stored(configuration_clauses([node(), odd], URL))
    assert [row["key"] for row in rows] == [clause.key for clause in requirements()]
    assert all(len(row["details"]) <= 21 for row in rows)
