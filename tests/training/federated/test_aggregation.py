"""Test each aggregation with a hand-made round that has outlying clients, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.training.federated.built_in import built_in
from training.config import choices
from training.federated.aggregation import _robust
from training.federated.aggregation._robust import TooFewUpdates, distances
from training.federation import config_checks, parts
from training.federation.config import FOLDERS, FederationConfig

THREE = torch.tensor([[0.0, 2.0], [1.0, 4.0], [8.0, 3.0]])
WEIGHTS = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
LEAST: dict[str, tuple[int, int]] = {
    "median": (2, 1),
    "trimmed_mean": (2, 1),
    "krum": (2, 3),
    "multi_krum": (2, 3),
    "bulyan": (4, 3),
}
"""f bad ones among at least each · f + more."""
BEARS = {"trimmed_mean": "trim"}
NAMES = built_in("aggregation")


def combine(name: str, rows: Tensor, weights: Any = None, **options: Any) -> tuple[list[float], list[int]]:
    weights = torch.ones(len(rows), dtype=torch.float64) if weights is None else weights
    row, left_out = parts.aggregation(name).combine(rows, weights, **options)
    assert row.dtype == torch.float64
    return row.tolist(), list(left_out)


def exactly(row: list[float]) -> Tensor:
    return torch.tensor(row, dtype=torch.float64)


class TestThreeUpdates:
    def test_mean(self) -> None:
        assert combine("mean", THREE, WEIGHTS) == ([(2 + 40) / 8, (2 + 8 + 15) / 8], [])

    def test_median_takes_each_number_by_itself(self) -> None:
        assert combine("median", THREE, WEIGHTS) == ([1.0, 3.0], [0])

    def test_median_of_four_is_between_the_two_in_the_middle(self) -> None:
        rows = torch.cat([THREE, torch.tensor([[3.0, -9.0]])])
        assert combine("median", rows) == ([2.0, 2.5], [])

    def test_trimmed_mean(self) -> None:
        rows = torch.cat([THREE, torch.tensor([[2.0, 5.0], [100.0, -100.0]])])
        assert combine("trimmed_mean", rows) == ([(1 + 2 + 8) / 3, (2 + 3 + 4) / 3], [4])

    def test_trimmed_by_nothing_is_the_plain_mean(self) -> None:
        assert combine("trimmed_mean", THREE, trim=0) == ([3.0, 3.0], [])

    def test_krum_selects_the_update_nearest_to_its_neighbours(self) -> None:
        # n - f - 2 = 1 neighbour: 0 and 1 are √5 from each other, and the first of equals is taken.
        assert combine("krum", THREE, f=0) == ([0.0, 2.0], [1, 2])

    def test_multi_krum(self) -> None:
        assert combine("multi_krum", THREE, f=0, m=2) == ([0.5, 3.0], [2])

    def test_bulyan_without_bad_clients_is_the_mean(self) -> None:
        assert combine("bulyan", THREE, f=0) == ([3.0, 3.0], [])

    def test_bulyan_of_seven(self) -> None:
        # Krum takes five, not 9 and 50; of 0 1 2 3 5 the three nearest to 2 are averaged.
        rows = torch.tensor([[0.0], [1.0], [2.0], [3.0], [5.0], [9.0], [50.0]])
        assert combine("bulyan", rows, f=1) == ([2.0], [5, 6])

    def test_norm_clipping_shortens_and_then_weighs(self) -> None:
        rows = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, -10.0]])
        row, left_out = combine("norm_clipping", rows, WEIGHTS, norm=1.0)
        assert row == pytest.approx([0.6 / 8, (0.8 + 2 - 5) / 8], abs=1e-15)
        assert left_out == []

    def test_norm_clipping_by_the_median_norm(self) -> None:
        rows = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, -10.0]])
        assert combine("norm_clipping", rows)[0] == pytest.approx([1.0, 0.0], abs=1e-15)

    def test_fltrust(self) -> None:
        rows = torch.tensor([[4.0, 0.0], [0.6, 0.8], [-1.0, 0.0]])
        trusted = torch.tensor([2.0, 0.0])
        row, left_out = parts.aggregation("fltrust").combine(rows, WEIGHTS, trusted)
        # Cosines 1, 0.6 and -1; each as long as the trusted one; what they have of samples counts for nothing.
        assert row.tolist() == pytest.approx([(2.0 + 0.6 * 1.2) / 1.6, 0.6 * 1.6 / 1.6], abs=1e-7)
        assert list(left_out) == [2]

    def test_hierarchical_means_are_the_mean(self) -> None:
        row, left_out = combine("hierarchical", THREE, WEIGHTS, inner="mean", outer="mean")
        assert row == pytest.approx(combine("mean", THREE, WEIGHTS)[0], abs=1e-15)
        assert left_out == []

    def test_hierarchical_median_of_group_means(self) -> None:
        rows = torch.tensor([[0.0], [2.0], [3.0], [5.0], [1e6], [1e6]])
        weights = torch.tensor([1.0, 3.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
        # 1.5, 4 and a million; the groups that are not the middle one are left out with all of theirs.
        assert combine("hierarchical", rows, weights, groups=3) == ([4.0], [0, 1, 4, 5])

    def test_a_group_weighs_what_counts_in_it(self) -> None:
        rows = torch.tensor([[0.0], [1.0], [50.0], [4.0]])
        weights = torch.tensor([1.0, 1.0, 100.0, 2.0], dtype=torch.float64)
        row, left_out = combine("hierarchical", rows, weights, groups=2, inner="median", outer="mean")
        assert left_out == []
        assert row == [(0.5 * 2 + 27.0 * 102) / 104]
        rows = torch.tensor([[0.0], [1.0], [2.0], [4.0], [5.0], [99.0]])
        weights = torch.tensor([1.0, 1.0, 1.0, 9.0, 2.0, 9.0], dtype=torch.float64)
        row, left_out = combine("hierarchical", rows, weights, groups=2, inner="trimmed_mean", outer="mean", f=1)
        assert (row, left_out) == ([(1.0 * 1 + 5.0 * 2) / 3], [0, 2, 3, 5])


@given(
    st.sampled_from(sorted(LEAST)),
    st.integers(0, 3),
    st.integers(0, 4),
    st.integers(0, 2**31),
    st.sampled_from([1e6, -1e6, 1e30]),
)
@settings(max_examples=60, deadline=None)
def test_bad_clients_far_away_are_those_left_out(name: str, f: int, more: int, seed: int, far: float) -> None:
    each, least = LEAST[name]
    clients = each * f + least + more
    draw = torch.Generator().manual_seed(seed)
    honest = torch.randn(clients - f, 5, generator=draw)
    places = torch.randperm(clients, generator=draw)
    rows = torch.empty(clients, 5)
    bad, good = places[:f], places[f:]
    rows[good] = honest
    rows[bad] = far * (1 + torch.rand(f, 5, generator=draw))
    row, left_out = combine(name, rows, **{BEARS.get(name, "f"): f})
    assert set(bad.tolist()) <= set(left_out)
    assert len(left_out) < clients
    low, high = honest.double().min(dim=0).values - 1e-12, honest.double().max(dim=0).values + 1e-12
    assert ((exactly(row) >= low) & (exactly(row) <= high)).all()


@pytest.mark.parametrize("name", sorted(LEAST))
def test_bad_clients_that_turn_their_updates_round_are_left_out_though_zeros_stay(name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    rows = 1 + torch.rand(7, 6, generator=draw)
    rows[:, :2] = 0  # a pixel that is never lit has no gradient
    rows[4] *= -1e6
    assert 4 in combine(name, rows)[1]


@pytest.mark.parametrize("name", sorted(LEAST))
def test_of_updates_that_are_alike_somebody_counts(name: str) -> None:
    row, left_out = combine(name, torch.ones(9, 3))
    assert row == [1.0] * 3
    assert len(left_out) < 9


@given(st.integers(5, 20), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_multi_krum_of_all_but_f_without_an_attack_is_about_the_mean(clients: int, seed: int) -> None:
    rows = 1 + 1e-3 * torch.randn(clients, 8, generator=torch.Generator().manual_seed(seed))
    row, left_out = combine("multi_krum", rows, f=1)
    assert len(left_out) == 1
    assert torch.allclose(exactly(row), rows.double().mean(dim=0), atol=2e-3)
    assert combine("multi_krum", rows, f=0)[0] == pytest.approx(rows.double().mean(dim=0).tolist(), abs=1e-14)


@given(st.integers(3, 30), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_bulyan_s_short_cut_chooses_whom_krum_would_choose_again_and_again(clients: int, seed: int) -> None:
    from training.federated.aggregation import bulyan

    f = (clients - 3) // 4
    apart = distances(torch.randn(clients, 4, generator=torch.Generator().manual_seed(seed)))
    left = list(range(clients))
    chosen: list[int] = []
    while len(chosen) < clients - 2 * f:
        scores = _robust.krum_scores(apart[left][:, left], f)
        chosen.append(left.pop(int(scores.argmin())))
    assert bulyan._chosen(apart, f, clients - 2 * f) == chosen


def test_distances_are_computed_by_blocks_and_not_disturbed_by_an_outlier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_robust, "BLOCK", 20)
    rows = 1000 + torch.randn(5, 33, generator=torch.Generator().manual_seed(1))
    rows[3] = 1e25
    exact = torch.cdist(rows.double(), rows.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    assert torch.allclose(distances(rows), exact, rtol=1e-12)
    assert (distances(rows).diagonal() == 0).all()


def test_updates_too_far_apart_for_float64_are_infinitely_far() -> None:
    rows = torch.tensor([[0.0], [1.0], [2.0], [1e200], [3e200]], dtype=torch.float64)
    assert combine("krum", rows, f=1)[0] == [1.0]
    assert distances(rows)[3, 4] == torch.inf


@pytest.mark.parametrize("name", sorted(LEAST))
def test_a_single_missing_update_is_too_few(name: str) -> None:
    each, more = LEAST[name]
    with pytest.raises(TooFewUpdates, match="are left"):
        combine(name, torch.zeros(each * 2 + more - 1, 3), **{BEARS.get(name, "f"): 2})


def test_multi_krum_wants_as_many_as_it_keeps() -> None:
    with pytest.raises(TooFewUpdates):
        combine("multi_krum", torch.zeros(6, 2), f=1, m=6)


def test_fltrust_fails_when_all_updates_point_away() -> None:
    for trusted in ([1.0, 0.0], [0.0, 0.0]):
        with pytest.raises(TooFewUpdates):
            parts.aggregation("fltrust").combine(torch.tensor([[-1.0, 0.0]]), WEIGHTS[:1], torch.tensor(trusted))


def test_norms_longer_than_allowed_never_come_out() -> None:
    rows = 1e6 * torch.randn(6, 10, generator=torch.Generator().manual_seed(5))
    row, _ = combine("norm_clipping", rows, norm=0.5)
    assert exactly(row).norm() <= 0.5 + 1e-12


class TestChecks:
    def of(self, aggregation: str, clients: int, per_round: int | None = None, **options: Any) -> list[tuple[str, str]]:
        table: dict[str, Any] = {"aggregation": aggregation, "clients": clients}
        if per_round is not None:
            table["per_round"] = per_round
        config = FederationConfig.model_validate({**table, aggregation: options})
        return [(problem.field, problem.message) for problem in config_checks.problems(config, 1)]

    @pytest.mark.parametrize("name", sorted(LEAST))
    @pytest.mark.parametrize("f", [1, 2, 3])
    def test_the_minimum_number_passes_and_fewer_are_refused_with_what_works(self, name: str, f: int) -> None:
        each, more = LEAST[name]
        option = BEARS.get(name, "f")
        assert self.of(name, each * f + more, **{option: f}) == []
        ((field, message),) = self.of(name, 30, per_round=each * f + more - 1, **{option: f})
        assert field == f"{name}.{option}"
        assert f"Write {f - 1}" in message
        assert f"or per_round = {each * f + more}." in message
        assert self.of(name, 30, per_round=each * f + more - 1, **{option: f - 1}) == []

    def test_so_few_that_no_f_helps(self) -> None:
        ((field, message),) = self.of("krum", 2)
        assert field == "clients"
        assert "at least 3 updates a round, and 2 are expected. Write clients = 3." in message

    def test_of_a_deadline_only_the_quorum_is_sure(self) -> None:
        def of(quorum: float) -> list[tuple[str, str]]:
            table = {"aggregation": "bulyan", "clients": 10, "pace": "deadline", "deadline": {"quorum": quorum}}
            found = config_checks.problems(FederationConfig.model_validate(table), 1)
            return [(problem.field, problem.message) for problem in found]

        ((field, message),) = of(0.5)
        assert field == "bulyan.f"
        assert message.endswith("and 5 are expected. Write 0, or quorum = 0.7 in [run.deadline].")
        assert of(0.7) == []

    def test_more_selected_than_can_be_good(self) -> None:
        ((field, message),) = self.of("multi_krum", 10, f=2, m=9)
        assert field == "multi_krum.m"
        assert "Write at most 8." in message
        assert self.of("multi_krum", 10, f=2, m=8) == []

    @pytest.mark.parametrize(
        ("options", "field", "remedy"),
        [
            ({"groups": 11}, "hierarchical.groups", "Write 10."),
            ({"groups": 4, "inner": "krum"}, "hierarchical.groups", "Write 3."),
            ({"groups": 2, "outer": "krum"}, "hierarchical.groups", "Write 3."),
            ({"groups": 3, "inner": "krum", "outer": "krum", "f": 1}, "hierarchical.f", "Write 0."),
            ({"groups": 5, "outer": "median", "f": 3}, "hierarchical.f", "Write 2 or less."),
        ],
    )
    def test_groups_that_their_rules_can_not_work_with(self, options: Any, field: str, remedy: str) -> None:
        found = self.of("hierarchical", 10, **options)
        assert field in {where for where, _ in found}
        assert remedy in found[0][1]

    def test_groups_that_work(self) -> None:
        assert self.of("hierarchical", 10, groups=3, inner="krum", outer="median", f=0) == []
        assert self.of("hierarchical", 15, groups=3, inner="krum", outer="median", f=1) == []


def test_each_has_its_paper_on_the_first_line() -> None:
    for name in NAMES:
        assert "arXiv" in choices.get(FOLDERS["aggregation"], name).description or name == "mean"


def krum_by_the_paper(rows: list[list[Fraction]], f: int) -> list[Fraction]:
    """Return each row's score in exact arithmetic: the sum of squared distances to its n - f - 2 nearest others."""
    scores = []
    for place, row in enumerate(rows):
        apart = sorted(
            sum(((a - b) ** 2 for a, b in zip(row, other, strict=True)), Fraction(0))
            for number, other in enumerate(rows)
            if number != place
        )
        scores.append(sum(apart[: max(1, len(rows) - f - 2)], Fraction(0)))
    return scores


def bulyan_by_the_paper(rows: list[list[Fraction]], f: int) -> list[float]:
    """El Mhamdi et al.'s two stages in exact arithmetic; of equal scores the first is taken."""
    left, chosen = list(rows), list[list[Fraction]]()
    while len(chosen) < len(rows) - 2 * f:
        scores = krum_by_the_paper(left, f) if len(left) > 1 else [Fraction(0)]
        chosen.append(left.pop(scores.index(min(scores))))
    found = []
    for column in zip(*chosen, strict=True):
        ordered = sorted(column)
        middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        nearest = sorted(ordered, key=lambda number: abs(number - middle))[: len(rows) - 4 * f]
        found.append(float(sum(nearest, Fraction(0)) / len(nearest)))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_bulyan_and_krum_are_the_papers_also_where_two_updates_are_tied(seed: int) -> None:
    """At n = 4f + 3 the last pick of Bulyan is always between two updates of the same score: their distance."""
    f, clients = 2, 11
    rows = torch.randn(clients, 40, generator=torch.Generator().manual_seed(seed))
    exact = [[Fraction(number) for number in row] for row in rows.double().tolist()]
    assert combine("bulyan", rows, f=f)[0] == pytest.approx(bulyan_by_the_paper(exact, f), rel=0, abs=1e-12)
    scores = krum_by_the_paper(exact, f)
    best = scores.index(min(scores))
    assert combine("krum", rows, f=f)[0] == [float(number) for number in exact[best]]
    nearest = sorted(range(clients), key=lambda place: scores[place])[: clients - f]
    expected = [float(sum((exact[place][at] for place in nearest), Fraction(0)) / len(nearest)) for at in range(40)]
    assert combine("multi_krum", rows, f=f)[0] == pytest.approx(expected, rel=0, abs=1e-12)


SYMMETRIC = """
import torch
from training.federated.aggregation._robust import distances

torch.set_num_threads(1)
for seed in range(100):
    apart = distances(torch.randn(11, 276, generator=torch.Generator().manual_seed(seed)))
    assert torch.equal(apart, apart.T), seed
"""


def test_two_updates_are_as_far_apart_either_way() -> None:
    """Products of matrices are not symmetric with older processors' instructions: this needs a separate process."""
    settings = {**os.environ, "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    subprocess.run([sys.executable, "-c", SYMMETRIC], env=settings, check=True, timeout=60)  # noqa: S603
