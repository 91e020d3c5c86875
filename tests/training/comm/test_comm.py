"""Test that every way to exchange gradients matches its definition on several ranks, and reports its bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.comm import exchanges
from tests.training.ranks import fork
from training.config import communication

ACTS = ["halved", "sparse", "low_rank", "skipped", "fewer", "replicas", "computed"]
Reports = dict[int, dict[str, list[dict[str, Any]]]]
"""What each rank found, by the number of ranks and the act."""
_PARAMETERS = ("0.weight", "0.bias", "2.weight", "2.bias")


def test_the_documented_tables_are_the_code_s() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "communication.md").read_text()
    assert "\n".join(communication.markdown_list()) in page
    assert "\n".join(communication.options()) in page


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    folder = tmp_path_factory.mktemp("exchanges")
    found: Reports = {}
    for world in (2, 4):
        ranks = [fork(exchanges.rank, folder, world, rank, ACTS) for rank in range(world)]
        for process in ranks:
            process.join(60)
        found[world] = {act: [_read(folder / f"{act}.{world}.{rank}.json") for rank in range(world)] for act in ACTS}
    return found


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _of(reports: Reports, world: int, act: str) -> list[dict[str, Any]]:
    for rank in reports[world][act]:
        assert "error" not in rank, rank["error"]
    return reports[world][act]


def worlds(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.parametrize("world", [2, 4])(test))


@worlds
@pytest.mark.parametrize(("name", "bits"), [("fp16", 11), ("bf16", 8)])
def test_sixteen_bits_are_the_sum_in_sixteen_bits(world: int, name: str, bits: int, reports: Reports) -> None:
    for rank in _of(reports, world, "halved"):
        found = rank[name]
        assert found["apart"] <= (0 if world == 2 else 2.0 ** (2 - bits)), "two are added in but one order"
        assert 0 < found["plain"] < 2.0 ** (2 - bits), "it did round"
        assert found["bytes"] == 2 * (world - 1) / world * 2 * found["elements"]
        assert found["digest"] == reports[world]["halved"][0][name]["digest"], "all ranks have the same"


@worlds
def test_top_k_is_the_sum_of_the_largest_of_each_rank(world: int, reports: Reports) -> None:
    for rank in _of(reports, world, "sparse"):
        assert rank["equal"] == [True] * exchanges.STEPS
        assert rank["kept"], "what was not sent is kept for the next step"
        assert rank["lost"] < 1e-6, "also over several buckets"
        assert rank["digests"] == reports[world]["sparse"][0]["digests"]
        assert rank["bytes"] == (world - 1) * 8 * -(-rank["elements"] * 5 // 100)


@worlds
def test_powersgd_is_the_best_of_its_rank_along_the_factors(world: int, reports: Reports) -> None:
    for rank in _of(reports, world, "low_rank"):
        assert max(rank["plain"]) < 1e-6
        assert max(rank["definition"]) < 1e-4
        assert max(rank["deep"]) < 1e-4, "each matrix by its own factor"
        assert rank["rank"] == 2
        assert rank["digests"] == reports[world]["low_rank"][0]["digests"]
        ring = 2 * (world - 1) / world * 4
        whole, thin = 30 * 40 + 30 + 20 * 30 + 20, 2 * (30 + 40) + 30 + 2 * (20 + 30) + 20
        assert rank["bytes"] == [ring * whole] * 2 + [ring * thin] * 3


@worlds
@pytest.mark.parametrize("name", ["topk", "powersgd"])
def test_a_skipped_step_leaves_no_trace(world: int, name: str, reports: Reports) -> None:
    for rank in _of(reports, world, "skipped"):
        assert rank[name] == [True, False, True, False]


@pytest.mark.slow
def test_ranks_that_are_left_keep_what_is_right_without_the_others(reports: Reports) -> None:
    """Only the sum of all ranks' errors is small in PowerSGD; one alone is as large as many steps' gradients."""
    for rank, found in enumerate(_of(reports, 4, "fewer")[:2]):
        stored = {name: tuple(is_) for name, is_ in found["topk"].items()}
        assert stored == dict.fromkeys([f"kept.{rank}.{name}" for name in _PARAMETERS], (True, True))
        factors = {name: tuple(is_) for name, is_ in found["powersgd"].items() if name.startswith("factors")}
        assert factors == dict.fromkeys(["factors.0.weight", "factors.2.weight"], (True, True))
        errors = {name: tuple(is_) for name, is_ in found["powersgd"].items() if name.startswith("errors")}
        assert errors == dict.fromkeys([f"errors.{rank}.{name}" for name in _PARAMETERS], (False, False))
    alone, _ = _of(reports, 2, "fewer")
    assert alone == {"topk": {}, "powersgd": {}}, "nothing that would come late, once there are others again"


@worlds
@pytest.mark.parametrize("case", ["local SGD", "outer SGD", "Nesterov"])
def test_exchanging_every_step_with_sgd_is_synchronous_sgd(world: int, case: str, reports: Reports) -> None:
    for rank in _of(reports, world, "replicas"):
        assert rank[case]["apart"] < 2e-6
        assert rank[case]["digest"] == reports[world]["replicas"][0][case]["digest"]


@worlds
def test_replicas_diverge_and_are_averaged_again(world: int, reports: Reports) -> None:
    alone = [rank["alone"] for rank in _of(reports, world, "replicas")]
    different = [len({rank["digests"][step] for rank in alone}) for step in range(5)]
    assert different == [world, world, 1, world, 1], "after every third step, and after the last"
    whole = 2 * (world - 1) / world * 4 * alone[0]["elements"]
    assert alone[0]["sent"] == pytest.approx([0, 0, whole, 0, whole])


@worlds
def test_what_fsdp_sends_is_what_is_computed_for_it(world: int, reports: Reports) -> None:
    for rank in _of(reports, world, "computed"):
        for case, found in rank.items():
            assert found["expected"] == pytest.approx(found["counted"]), case
            assert found["counted"] > 0
