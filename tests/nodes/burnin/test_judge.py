"""Each node gets one verdict, with reasons in plain sentences."""

from __future__ import annotations

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from nodes.burnin.judge import GoldenKey, GoldenValue, NodeResults, NodeVerdict, PeerMedians, judge
from nodes.burnin.reports import BurnInMachine, ItemSummary

H100 = "NVIDIA H100, torch 2.13, CUDA 13.0"
XEON = "Xeon, torch 2.13"
GOOD, BAD = "a" * 64, "b" * 64


def node(name: str = "dgx-01", *tests: ItemSummary, ended: bool = True, gpus: int = 8) -> NodeResults:
    return NodeResults(name, BurnInMachine("NVIDIA H100", gpus, "570.1"), list(tests), ended, expected_gpus=8)


def matrix(gpu: int, digest: str = GOOD, value: float = 700.0) -> ItemSummary:
    return ItemSummary("matrix", f"GPU {gpu}", "TFLOP/s", H100, 1, values=[value], digests=[digest])


def copy(item: str, value: float, basis: str = H100) -> ItemSummary:
    return ItemSummary("copy", item, "GB/s", basis, 1, values=[value])


def pair(partner: str, detail: str = "", absences: int = 0) -> ItemSummary:
    return ItemSummary("pair", partner, "GB/s", H100, 1, int(bool(detail)), absences, detail=detail)


def texts(verdict: NodeVerdict) -> list[str]:
    return [finding.text for finding in verdict.findings]


def only(*tests: ItemSummary, **golden: GoldenValue) -> NodeVerdict:
    return judge([node("dgx-01", *tests)], {})["dgx-01"]


def test_passes_where_all_agree() -> None:
    verdict = only(*(matrix(gpu) for gpu in range(8)), *(copy(f"host to GPU {gpu}", 24.8) for gpu in range(8)))
    assert (verdict.verdict, verdict.findings) == ("passed", [])


def test_names_the_gpu_whose_products_differ() -> None:
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


def test_products_that_change_from_one_time_to_the_next() -> None:
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


def test_of_two_nodes_none_can_be_blamed_alone() -> None:
    found = judge([node("a", pair("b", "timed out")), node("b", pair("a", "timed out"))], {})
    assert [verdict.verdict for verdict in found.values()] == ["failed", "failed"]


def test_who_waits_for_a_lost_node_passes() -> None:
    lost = NodeResults("b", problem="b failed during the burn-in (node_fail).", is_node_lost=True)
    found = judge([node("a", matrix(0), pair("b", absences=1)), lost], {})
    assert (found["a"].verdict, found["b"].verdict) == ("passed", "failed")
    assert texts(found["b"]) == ["b failed during the burn-in (node_fail)."]


def test_nothing_reported_is_inconclusive() -> None:
    assert judge([NodeResults("a")], {})["a"].verdict == "inconclusive"
    assert judge([node("a", matrix(0), ended=False)], {})["a"].verdict == "inconclusive"
    assert judge([node("a", matrix(0), matrix(1, BAD), matrix(2), ended=False)], {})["a"].verdict == "failed"


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40))
def test_medians_of_peers(values: list[float]) -> None:
    peers = PeerMedians(values)
    for place, value in enumerate(values):
        assert peers.without(value) == median(values[:place] + values[place + 1 :])
    assert PeerMedians(values[:1]).without(values[0]) is None


def test_256_nodes_of_8_gpus_are_judged_at_once() -> None:
    """A group of 65,280 pairs must not be compared each with each."""
    names = [f"n{number:03}" for number in range(256)]
    nodes = [
        node(
            name,
            *(matrix(gpu) for gpu in range(8)),
            *(
                ItemSummary("pair", other, "GB/s", H100, 1, values=[40.0 if name == "n007" else 90.0])
                for other in names
                if other != name
            ),
        )
        for name in names
    ]
    found = judge(nodes, {})
    assert [name for name, verdict in found.items() if verdict.verdict == "failed"] == ["n007"]
