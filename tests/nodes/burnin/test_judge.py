"""Each node gets one verdict, with reasons in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.burnin.evidence import GoldenKey, GoldenValue, NodeResults
from nodes.burnin.judge import NodeVerdict, judge
from nodes.burnin.reports import BurnInMachine, ItemSummary
from nodes.burnin.speeds import PeerMedians

H100 = "NVIDIA H100, torch 2.13, CUDA 13.0"
XEON = "Xeon, torch 2.13"
GOOD, BAD = "a" * 64, "b" * 64


def node(name: str = "dgx-01", *tests: ItemSummary, ended: bool = True, gpus: int = 8) -> NodeResults:
    """Return a node of which every test has a result; those that are not given have no values to compare."""
    found = {(test.test, test.item): test for test in (*bare_results(gpus), *tests)}
    return NodeResults(name, BurnInMachine("NVIDIA H100", gpus, "570.1"), list(found.values()), ended, expected_gpus=8)


def bare_results(gpus: int) -> list[ItemSummary]:
    names = [f"GPU {number}" for number in range(gpus)]
    items = [(test, name) for test in ("memory", "matrix") for name in names or ["CPUs"]]
    items += [("copy", f"{source} to {target}") for source, target in permutations(["host", *names], 2)]
    items += [("copy", "memory to memory")] * (not names) + [("all-reduce", "all")] * (gpus != 1)
    items += [("host memory", "memory"), ("disk", "write /tmp"), ("disk", "read /tmp")]
    return [ItemSummary(test, item, count=1) for test, item in items]


def matrix(gpu: int, digest: str = GOOD, value: float = 700.0) -> ItemSummary:
    return ItemSummary("matrix", f"GPU {gpu}", "TFLOP/s", H100, 1, values=[value], digests=[digest])


def copy(item: str, value: float, basis: str = H100) -> ItemSummary:
    return ItemSummary("copy", item, "GB/s", basis, 1, values=[value])


def pair(partner: str, detail: str = "", absences: int = 0, *, count: int = 1, speed: float = 0) -> ItemSummary:
    values = [speed] if speed else []
    return ItemSummary("pair", partner, "GB/s", H100, count, int(bool(detail)), absences, values, detail=detail)


def paired(names: Sequence[str], slow: Sequence[set[str]]) -> list[NodeResults]:
    """Return nodes that met each other: both ends of a pair measure the same."""
    speeds = {frozenset(ends): 12.0 if set(ends) in slow else 24.0 for ends in combinations(names, 2)}
    return [
        node(name, *(pair(other, speed=speeds[frozenset((name, other))]) for other in names if other != name))
        for name in names
    ]


def golden_of(test: str, count: int, value: float | None = None, digest: str = "", kind: str = "GPU") -> Any:
    return {GoldenKey("NVIDIA H100", "570.1", test, kind, H100): GoldenValue(count, value, digest)}


def failed(found: Mapping[str, NodeVerdict]) -> list[str]:
    return [name for name, verdict in found.items() if verdict.verdict == "failed"]


def texts(verdict: NodeVerdict) -> list[str]:
    return [finding.text for finding in verdict.findings]


def only(*tests: ItemSummary, **golden: GoldenValue) -> NodeVerdict:
    return judge([node("dgx-01", *tests)], {})["dgx-01"]


def test_passes_where_all_agree() -> None:
    verdict = only(*(matrix(gpu) for gpu in range(8)), *(copy(f"host to GPU {gpu}", 24.8) for gpu in range(8)))
    assert (verdict.verdict, verdict.findings) == ("passed", [])


def test_names_the_gpu_with_different_products() -> None:
    verdict = only(*(matrix(gpu, BAD if gpu == 3 else GOOD) for gpu in range(8)))
    assert verdict.verdict == "failed"
    assert texts(verdict) == ["GPU 3: matrix products differ from those of 7 other GPUs."]


def test_majority_over_nodes_judges_a_node_of_which_all_gpus_differ() -> None:
    good = [node(f"dgx-0{number}", *(matrix(gpu) for gpu in range(8))) for number in (1, 2)]
    bad = node("dgx-03", *(matrix(gpu, BAD) for gpu in range(8)))
    found = judge([*good, bad], {})
    assert [found[name].verdict for name in ("dgx-01", "dgx-02", "dgx-03")] == ["passed", "passed", "failed"]
    assert len(found["dgx-03"].findings) == 8


def test_without_a_majority_none_of_two_devices_is_trusted() -> None:
    assert only(matrix(0), matrix(1, BAD)).verdict == "failed"


def test_products_are_only_compared_with_the_same_software() -> None:
    other = ItemSummary("matrix", "GPU 1", "TFLOP/s", "NVIDIA H100, torch 2.14, CUDA 13.0", 1, digests=[BAD])
    assert only(matrix(0), other).verdict == "passed"


def test_the_golden_record_decides_where_peers_cannot() -> None:
    key = GoldenKey("NVIDIA H100", "570.1", "matrix", "GPU", H100)
    golden = {key: GoldenValue(12, 700.0, GOOD)}
    verdict = judge([node("dgx-01", matrix(0, BAD))], golden)["dgx-01"]
    assert texts(verdict) == ["GPU 0: matrix products differ from those of 12 earlier burn-ins."]
    verdict = judge([node("dgx-01", matrix(0), matrix(1, BAD))], golden)["dgx-01"]
    assert texts(verdict) == ["GPU 1: matrix products differ from those of 12 earlier burn-ins."]
    slow = judge([node("dgx-01", matrix(0, value=350.0))], golden)["dgx-01"]
    assert texts(slow) == ["Matrix GPU 0: 350 TFLOP/s, earlier burn-ins 700."]


def test_a_uniformly_slow_node_fails_by_earlier_burn_ins() -> None:
    slow = [node("dgx-01", *(matrix(gpu, value=350.0) for gpu in range(8)))]
    found = judge(slow, golden_of("matrix", 50, 700.0))["dgx-01"]
    assert (found.verdict, len(found.findings)) == ("failed", 8)
    assert texts(found)[0] == "Matrix GPU 0: 350 TFLOP/s, earlier burn-ins 700."


def test_earlier_burn_ins_only_warn_of_nodes_that_agree_and_before_they_are_enough() -> None:
    nodes = [node(f"n{number}", *(matrix(gpu, BAD, 350.0) for gpu in range(8))) for number in range(8)]
    for judged, count in ((nodes, 50), (nodes[:1], 2)):
        found = judge(judged, golden_of("matrix", count, 700.0, GOOD))
        assert {verdict.verdict for verdict in found.values()} == {"passed"}
        assert texts(found["n0"]) == [
            f"Matrix products differ from those of {count} earlier burn-ins. "
            "If that is normal now, delete the golden record on the page Burn-ins.",
            f"Matrix GPU: slower than the 700 TFLOP/s of {count} earlier burn-ins. "
            "If that is normal now, delete the golden record on the page Burn-ins.",
        ]


DIGESTS = st.lists(st.lists(st.sampled_from([GOOD, BAD, "c" * 64]), min_size=1, max_size=4), min_size=1, max_size=4)


@given(DIGESTS, st.integers(0, 50), st.sampled_from(["", GOOD, BAD]), st.data())
def test_agreement_never_fails_more_gpus(
    digests: list[list[str]], count: int, record: str, data: st.DataObject
) -> None:
    """A GPU that differs from what counts as right, and then agrees with it, must not turn others into failures."""
    golden = golden_of("matrix", count, digest=record)

    def failures(digests: list[list[str]]) -> set[tuple[int, int]]:
        nodes = [
            node(str(n), *(matrix(gpu, found) for gpu, found in enumerate(gpus))) for n, gpus in enumerate(digests)
        ]
        found = judge(nodes, golden)
        return {
            (n, gpu) for n, gpus in enumerate(digests) for gpu in range(len(gpus))
            if any(f"GPU {gpu}: " in text for text in texts(found[str(n)]))
        }  # fmt: skip

    before = failures(digests)
    places = {(n, gpu) for n, gpus in enumerate(digests) for gpu in range(len(gpus))}
    if not before or before == places:
        return
    n, gpu = data.draw(st.sampled_from(sorted(before)))
    right_n, right_gpu = min(places - before)
    digests[n][gpu] = digests[right_n][right_gpu]
    assert failures(digests) < before


def test_products_that_differ_between_repetitions() -> None:
    test = ItemSummary("matrix", "GPU 3", "TFLOP/s", H100, 2, digests=[GOOD, BAD])
    assert texts(only(test)) == ["GPU 3: products of the same matrices differ from one time to the next."]


def test_names_the_slow_copy() -> None:
    verdict = only(*(copy(f"host to GPU {gpu}", 12.1 if gpu == 2 else 24.8) for gpu in range(8)))
    assert verdict.verdict == "failed"
    assert texts(verdict) == ["Copy host to GPU 2: 12.1 GB/s, peers 24.8."]


def test_links_between_gpus_are_compared_with_the_same_link_elsewhere() -> None:
    def links(far: float) -> list[ItemSummary]:
        return [copy("GPU 0 to GPU 1", 380.0), copy("GPU 0 to GPU 4", far)]

    found = judge([node(f"dgx-0{number}", *links(19.0)) for number in range(1, 5)], {})
    assert {verdict.verdict for verdict in found.values()} == {"passed"}, "4 + 4 GPUs are meant to be like that"
    found = judge([node(f"dgx-0{number}", *links(9.0 if number == 2 else 19.0)) for number in range(1, 5)], {})
    assert [name for name, verdict in found.items() if verdict.verdict == "failed"] == ["dgx-02"]


def test_a_slow_processor_is_only_a_warning() -> None:
    nodes = [node(f"n{number}", copy("memory to memory", 1.0 if number == 1 else 9.0, XEON)) for number in range(4)]
    verdict = judge(nodes, {})["n1"]
    assert (verdict.verdict, texts(verdict)) == ("passed", ["Copy memory to memory: 1 GB/s, peers 9."])
    assert verdict.findings[0].is_warning


def test_reports_errors_with_their_count() -> None:
    test = ItemSummary("memory", "GPU 3", count=5, failures=2, detail="12 words read back differ")
    assert texts(only(test)) == ["GPU 3, memory: 12 words read back differ (2 of 5 times)."]
    mount = ItemSummary("mount", "/data", count=1, failures=1, detail="did not answer within 20 s")
    assert texts(only(mount)) == ["/data, mount: did not answer within 20 s."]


def test_a_missing_gpu_fails() -> None:
    verdict = judge([node("dgx-01", *(matrix(gpu) for gpu in range(7)), gpus=7)], {})["dgx-01"]
    assert (verdict.verdict, texts(verdict)) == ("failed", ["Found 7 of 8 GPUs."])


def test_of_bad_pairs_the_node_with_most_of_them_is_blamed() -> None:
    names = ["a", "b", "c", "d"]
    nodes = [
        node(name, *(pair(other, "timed out" if "c" in (name, other) else "") for other in names if other != name))
        for name in names
    ]
    found = judge(nodes, {})
    assert [name for name, verdict in found.items() if verdict.verdict == "failed"] == ["c"]
    assert texts(found["c"]) == [f"All-reduce with {other}: timed out." for other in "abd"]


@given(st.integers(3, 9), st.integers(0, 8))
def test_only_the_node_with_the_slow_link_fails(count: int, place: int) -> None:
    names = [f"n{number}" for number in range(count)]
    bad = names[place % count]
    found = judge(paired(names, [{bad, name} for name in names]), {})
    assert failed(found) == [bad]
    others = [name for name in names if name != bad]
    source = "fastest other pair" if count == 3 else "median of other pairs"
    assert texts(found[bad]) == [f"All-reduce with {name}: 12 GB/s; {source}: 24 GB/s." for name in others]


def test_two_nodes_with_a_slow_link_are_judged_by_earlier_burn_ins() -> None:
    nodes = paired(["a", "b"], [{"a", "b"}])
    assert failed(judge(nodes, {})) == []
    assert failed(judge(nodes, golden_of("pair", 50, 24.0, kind="another node"))) == ["a", "b"]


def test_pairs_of_different_models_are_not_compared() -> None:
    nodes = paired(["a", "b", "c", "d"], [{"d", name} for name in "abc"])
    nodes[3].machine = BurnInMachine("NVIDIA A100", 8, "570.1")
    assert failed(judge(nodes, {})) == []


@pytest.mark.parametrize("fault", ["lost", "not ended", "another finding"])
@pytest.mark.parametrize("others", ["a", "ac"])
def test_a_failed_pair_is_blamed_on_the_node_with_another_fault(fault: str, others: str) -> None:
    met = {name: [pair(other, count=2) for other in others if other != name] for name in others}
    met["a"].append(pair("b", "timed out", count=2))
    if "c" in others:
        met["c"].append(pair("b", absences=1, count=2))
    bad = node("b", *(pair(other) for other in others))
    bad.is_node_lost, bad.problem, bad.ended = fault == "lost", "The node failed during the burn-in.", False
    if fault == "another finding":
        bad.ended = True
        bad.tests.append(ItemSummary("memory", "GPU 3", count=5, failures=1, detail="12 words differ"))
    found = judge([*(node(name, *tests) for name, tests in met.items()), bad], {})
    assert failed(found) == ["b"]
    assert "All-reduce with a: timed out (1 of 2 times)." in texts(found["b"])


def test_pairs_fail_because_of_the_lost_node_though_its_loss_ended_the_tests_of_others() -> None:
    lost = node("b", ended=False)
    lost.is_node_lost, lost.problem = True, "The node failed during the burn-in."
    found = judge([node("a", pair("b", "timed out"), ended=False), lost], {})
    assert [finding.kind for finding in found["a"].findings] == ["gap"]
    assert [finding.kind for finding in found["b"].findings] == ["gap", "event"]


def test_a_process_that_cannot_start_for_a_pair_is_this_nodes_fault() -> None:
    nodes = [node("a", ItemSummary("start", "b", count=1, failures=1, detail="no memory")), node("b")]
    assert texts(judge(nodes, {})["a"]) == ["All-reduce with b could not start: no memory."]


@pytest.mark.parametrize(
    ("details", "verdicts"),
    [
        (["no module"], ["inconclusive"]),
        (["stopped"], ["failed"]),
        (["stopped", "stopped"], ["inconclusive", "inconclusive"]),
        (["no module", "stopped"], ["inconclusive", "failed"]),
        (["no module", "no module", ""], ["failed", "failed", "passed"]),
    ],
)
def test_software_is_to_blame_where_no_node_can_start(details: list[str], verdicts: list[str]) -> None:
    texts_of = {
        "no module": "ended with code 1: ModuleNotFoundError: No module named 'torch'",
        "stopped": "did not finish within 300 s and was stopped",
    }
    host = [ItemSummary("host memory", "memory", count=1), ItemSummary("disk", "read /tmp", count=1)]
    nodes = [
        NodeResults(f"n{number}", None, [start_failure(texts_of[detail]), *host], ended=True, expected_gpus=8)
        if detail else node(f"n{number}")
        for number, detail in enumerate(details)
    ]  # fmt: skip
    nodes.append(NodeResults("lost", problem="The node failed during the burn-in.", is_node_lost=True))
    found = judge(nodes, {})
    assert [verdict.verdict for verdict in found.values()] == [*verdicts, "failed"]


def start_failure(detail: str) -> ItemSummary:
    return ItemSummary("start", "this node", count=1, failures=1, detail=detail)


def test_another_fault_of_a_node_that_cannot_start_fails_it() -> None:
    mount = ItemSummary("mount", "/data", count=1, failures=1, detail="did not answer within 20 s")
    missing = start_failure("ended with code 1: ModuleNotFoundError: No module named 'torch'")
    found = judge([NodeResults("a", None, [missing, mount], ended=True)], {})["a"]
    assert (found.verdict, texts(found)) == ("failed", ["/data, mount: did not answer within 20 s."])


def test_of_two_nodes_none_can_be_blamed_alone() -> None:
    found = judge([node("a", pair("b", "timed out")), node("b", pair("a", "timed out"))], {})
    assert [verdict.verdict for verdict in found.values()] == ["failed", "failed"]


def test_who_waits_for_a_lost_node_passes() -> None:
    lost = NodeResults("b", problem="b failed during the burn-in (node_fail).", is_node_lost=True)
    found = judge([node("a", matrix(0), pair("b", absences=1)), lost], {})
    assert (found["a"].verdict, found["b"].verdict) == ("passed", "failed")
    assert texts(found["b"]) == ["b failed during the burn-in (node_fail)."]


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_a_missing_result_is_inconclusive(gpus: int) -> None:
    complete = replace(node("a", gpus=gpus), expected_gpus=gpus)
    assert judge([complete], {})["a"].verdict == "passed"
    for missing in complete.tests:
        tests = [test for test in complete.tests if test is not missing]
        found = judge([replace(complete, tests=tests)], {})["a"]
        assert found.verdict == "inconclusive"
        assert texts(found)[0].startswith(f"Results are missing: {missing.test}")
    unknown = judge([replace(complete, machine=None)], {})["a"]
    assert texts(unknown) == ["The node did not report its GPUs and software."]


@pytest.mark.parametrize(("model", "expected"), [("NVIDIA H100 MIG 1g.10gb", 14), ("NVIDIA H100", 56)])
def test_slices_of_gpus_cannot_be_judged(model: str, expected: int) -> None:
    sliced = replace(node("a", gpus=1), machine=BurnInMachine(model, 1, "570.1"), expected_gpus=expected)
    found = judge([sliced], {})["a"]
    assert (found.verdict, "MIG" in texts(found)[0]) == ("inconclusive", True)


def test_a_folder_that_is_not_mounted_fails() -> None:
    def mounts(*bases: str) -> dict[str, NodeVerdict]:
        return judge([node(f"n{n}", ItemSummary("mount", "/data", basis=b)) for n, b in enumerate(bases)], {})

    found = mounts("nfs4 filer:/data", "ext4 /dev/nvme0n1p2", "nfs filer2:/data", "")
    assert failed(found) == ["n1"]
    assert texts(found["n1"]) == ["/data is not mounted: ext4 from /dev/nvme0n1p2; nfs on 2 of 3 nodes."]
    assert not [name for name in ("n0", "n2", "n3") if found[name].findings]
    found = mounts("nfs4 filer:/data", "nfs4 filer:/old", "nfs4 10.0.0.1:/data", "lustre mgs@o2ib:/data")
    assert {name: texts(verdict) for name, verdict in found.items() if verdict.findings} == {
        "n1": ["/data is nfs4 from filer:/old; /data on most nodes."],
        "n3": ["/data is lustre from mgs@o2ib:/data; nfs on 3 of 4 nodes."],
    }
    assert failed(found) == []
    found = mounts("xfs /dev/sda2", "nfs4 filer:/data")
    assert all(finding.is_warning for verdict in found.values() for finding in verdict.findings)
    assert {name: texts(verdict) for name, verdict in found.items()} == {
        "n0": ["/data is xfs from /dev/sda2 here, and of other types on other nodes."],
        "n1": ["/data is nfs4 from filer:/data here, and of other types on other nodes."],
    }
    assert failed(found) == []
    assert not any(verdict.findings for verdict in mounts("xfs /dev/sda2", "xfs /dev/sdb1").values())


def test_nothing_reported_is_inconclusive() -> None:
    assert judge([NodeResults("a")], {})["a"].verdict == "inconclusive"
    assert judge([node("a", matrix(0), ended=False)], {})["a"].verdict == "inconclusive"
    assert judge([node("a", matrix(0), matrix(1, BAD), matrix(2), ended=False)], {})["a"].verdict == "failed"


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40))
def test_medians_of_peers(values: list[float]) -> None:
    peers = PeerMedians(values)
    for place, value in enumerate(values):
        assert peers.without(value) == median(values[:place] + values[place + 1 :])
        if others := values[:place]:
            assert peers.without(*values[place:]) == median(others)
    assert PeerMedians(values[:1]).without(values[0]) is None


def test_256_nodes_of_8_gpus_are_judged_at_once() -> None:
    """A group of 65,280 pairs must not be compared each with each."""
    names = [f"n{number:03}" for number in range(256)]
    nodes = [
        node(
            name,
            *(matrix(gpu) for gpu in range(8)),
            *(pair(other, speed=40.0 if "n007" in (name, other) else 90.0) for other in names if other != name),
        )
        for name in names
    ]
    found = judge(nodes, {})
    assert [name for name, verdict in found.items() if verdict.verdict == "failed"] == ["n007"]
