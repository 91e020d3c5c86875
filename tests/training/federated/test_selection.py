"""Test client selection: the right number, nobody twice, reproducible by seed, round and retry; and each preference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.training.federated.built_in import built_in
from training.federated.selection.availability import share_since_available
from training.federation import client_selection, config, config_checks
from training.federation.config import FederationConfig
from training.federation.speeds import speeds

NAMES = built_in("selection")
Ids = NDArray[np.int64]


def config_of(
    selection: str, *, clients: int = 100, per_round: int = 10, seed: int = 0, **options: Any
) -> FederationConfig:
    return config.parse(
        {"selection": selection, "clients": clients, "per_round": per_round, "seed": seed, selection: options}
    )


def select(
    of: FederationConfig,
    round_: int,
    *,
    attempt: int = 1,
    eligible: Ids | None = None,
    samples: Ids | None = None,
    losses: NDArray[np.float64] | None = None,
) -> Ids:
    state = client_selection.SelectionState(
        eligible=np.arange(of.clients) if eligible is None else eligible,
        samples=np.full(of.clients, 10) if samples is None else samples,
        losses=np.full(of.clients, np.nan) if losses is None else losses,
        round=round_,
        attempt=attempt,
    )
    return client_selection.select(of, of.selected, state)


def shares(of: FederationConfig, rounds: int, **values: Any) -> NDArray[np.float64]:
    """Return (clients,): the share of rounds in which each takes part."""
    counts = np.zeros(of.clients)
    for round_ in range(1, rounds + 1):
        counts[select(of, round_, **values)] += 1
    return counts / rounds


@given(st.sampled_from(NAMES), st.integers(1, 40), st.integers(0, 2**32 - 1), st.integers(1, 1000), st.data())
@settings(max_examples=120, deadline=None)
def test_what_every_selection_promises(name: str, clients: int, seed: int, round_: int, data: Any) -> None:
    of = config_of(name, clients=clients, per_round=data.draw(st.integers(1, clients)), seed=seed)
    eligible = np.array(sorted(data.draw(st.sets(st.integers(0, clients - 1), min_size=1))))
    draw = np.random.RandomState(seed)
    inputs: dict[str, Any] = {
        "samples": draw.randint(1, 50, clients),
        "losses": np.where(draw.rand(clients) < 0.5, np.nan, 1.0),
    }
    found = select(of, round_, eligible=eligible, **inputs)
    assert len(found)
    assert (np.diff(found) > 0).all()
    assert np.isin(found, eligible).all()
    if name != "poisson":
        assert len(found) <= of.selected
    if name not in {"poisson", "availability"}:
        assert len(found) == min(of.selected, len(eligible))
    assert np.array_equal(found, select(of, round_, eligible=eligible, **inputs))


@pytest.mark.parametrize("name", NAMES)
def test_another_round_seed_or_try_selects_others(name: str) -> None:
    of = config_of(name, clients=1000)
    first = select(of, 1).tolist()
    assert first != select(of, 2).tolist()
    assert first != select(of, 1, attempt=2).tolist()
    assert first != select(config_of(name, clients=1000, seed=1), 1).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_of_all_that_there_are_everybody_is_config_of(name: str) -> None:
    of = config.parse(
        {"selection": name, "clients": 7, **({name: {"on_share": 1.0}} if name == "availability" else {})}
    )
    assert select(of, 1).tolist() == list(range(7))


class TestPoisson:
    def test_sizes_are_binomial(self) -> None:
        of = config_of("poisson", clients=100, per_round=20)
        sizes = np.array([len(select(of, round_)) for round_ in range(1, 401)])
        assert sizes.mean() == pytest.approx(20, abs=0.6)
        assert sizes.var() == pytest.approx(100 * 0.2 * 0.8, rel=0.25)

    def test_each_is_as_likely_whoever_else_takes_part(self) -> None:
        of = config_of("poisson", clients=20, per_round=10)
        took = np.zeros((2000, 20))
        for round_ in range(2000):
            took[round_, select(of, round_ + 1)] = 1
        assert np.abs(took.mean(axis=0) - 0.5).max() < 0.05
        assert np.abs(np.corrcoef(took.T) - np.eye(20)).max() < 0.1

    def test_never_nobody(self) -> None:
        of = config_of("poisson", clients=100, per_round=1)
        assert min(len(select(of, round_)) for round_ in range(1, 200)) == 1

    def test_the_chance_is_of_all_clients_not_of_those_left(self) -> None:
        of = config_of("poisson", clients=100, per_round=20)
        sizes = [len(select(of, round_, eligible=np.arange(50))) for round_ in range(1, 401)]
        assert np.mean(sizes) == pytest.approx(10, abs=0.6)

    def test_while_all_are_under_way_nobody_is_config_of(self) -> None:
        some, losses = np.arange(20), np.zeros(20)
        state = client_selection.SelectionState(eligible=some, samples=some, losses=losses, round=1)
        assert not len(client_selection.select(config_of("poisson"), 0, state))


class TestWeighted:
    def test_by_samples(self) -> None:
        samples = np.array([1, 2, 3, 4] * 25)
        found = shares(config_of("weighted", per_round=1), 4000, samples=samples)
        for count in (1, 2, 3, 4):
            assert found[samples == count].sum() == pytest.approx(count / 10, abs=0.03)

    def test_the_second_is_drawn_from_those_left(self) -> None:
        of = config_of("weighted", clients=3, per_round=2)
        found = shares(of, 4000, samples=np.array([1, 1, 2]))
        # The largest is left out if the others come first and second: 1/4 · 1/3, twice.
        assert found[2] == pytest.approx(1 - 2 * (1 / 4 * 1 / 3), abs=0.03)


class TestByResource:
    def test_the_fast_come_first(self) -> None:
        fast = speeds(0, 100)
        found = shares(config_of("by_resource"), 300)
        assert np.corrcoef(np.argsort(np.argsort(fast)), found)[0, 1] > 0.6
        assert found[np.argsort(-fast)[:10]].mean() > 10 * found[np.argsort(fast)[:50]].mean()

    def test_without_preference_all_alike(self) -> None:
        assert np.abs(shares(config_of("by_resource", preference=0.0), 1000) - 0.1).max() < 0.05


class TestByLoss:
    def test_among_all_the_highest(self) -> None:
        losses = np.random.RandomState(1).rand(20)
        of = config_of("by_loss", clients=20, per_round=5, candidates=20)
        assert select(of, 1, losses=losses).tolist() == np.sort(np.argsort(-losses)[:5]).tolist()

    def test_who_has_never_trained_comes_first(self) -> None:
        losses = np.full(20, 100.0)
        losses[[3, 8, 15]] = np.nan
        of = config_of("by_loss", clients=20, per_round=4, candidates=20)
        found = select(of, 1, losses=losses).tolist()
        assert {3, 8, 15} < set(found)

    @pytest.mark.parametrize("claimed", [1e9, 1e300])
    def test_a_claimed_loss_counts_no_more_than_a_high_loss(self, claimed: float) -> None:
        """Four report more than the others let expect, one of them without bounds: they are drawn alike."""
        losses = np.linspace(1.0, 2.0, 20)
        losses[[0, 5, 9, 14]] = [claimed, 4.0, 4.0, 4.0]
        found = shares(config_of("by_loss", clients=20, per_round=1, candidates=20), 800, losses=losses)
        assert found[0] == pytest.approx(1 / 4, abs=0.06)
        assert found[[0, 5, 9, 14]].sum() == pytest.approx(1)

    def test_as_many_candidates_as_participants_leave_no_choice(self) -> None:
        losses = np.arange(20.0)
        of = config_of("by_loss", clients=20, per_round=5, candidates=5)
        assert np.abs(shares(of, 1500, losses=losses) - 0.25).max() < 0.06

    def test_candidates_are_drawn_by_their_samples(self) -> None:
        samples = np.where(np.arange(20) < 10, 1, 9)
        of = config_of("by_loss", clients=20, per_round=1, candidates=1)
        assert shares(of, 1000, samples=samples)[10:].sum() == pytest.approx(0.9, abs=0.04)
        of = config_of("by_loss", clients=20, per_round=1, candidates=1, drawn_by="equal")
        assert shares(of, 1000, samples=samples)[10:].sum() == pytest.approx(0.5, abs=0.05)

    @pytest.mark.parametrize(("candidates", "nearest"), [(3, 5), (21, 20)])
    def test_too_few_or_too_many_candidates_are_refused(self, candidates: int, nearest: int) -> None:
        of = config_of("by_loss", clients=20, per_round=5, candidates=candidates)
        (problem,) = config_checks.problems(of, 1)
        assert problem.field == "by_loss.candidates"
        assert problem.message.endswith(f"Write {nearest}.")


class TestAvailability:
    def test_each_comes_once_a_period_for_its_share_of_it(self) -> None:
        of = config_of("availability", clients=200, per_round=200, period=20, on_share=0.25)
        there = np.zeros((20, 200), dtype=bool)
        for round_ in range(1, 21):
            there[round_ - 1, select(of, round_)] = True
        assert (there.sum(axis=0) == 5).all()
        comings = (there & ~np.roll(there, 1, axis=0)).sum(axis=0)
        assert (comings == 1).all()
        assert np.array_equal(select(of, 1), select(of, 21))

    def test_at_most_so_many(self) -> None:
        of = config_of("availability", clients=200, per_round=8)
        assert {len(select(of, round_)) for round_ in range(1, 50)} == {8}

    def test_when_nobody_is_there_the_next_to_come_is_waited_for(self) -> None:
        of = config_of("availability", clients=3, per_round=2, period=1000, on_share=0.001)
        since = share_since_available(0, 3, 5, 1000)
        (found,) = select(of, 5)
        assert found == since.argmax()
        assert len(select(of, 5, attempt=2)) == 2

    @pytest.mark.parametrize("per_round", [None, 8])
    def test_more_than_are_there_at_a_time_are_refused(self, per_round: int | None) -> None:
        table: dict[str, Any] = {"selection": "availability", "clients": 14}
        (problem,) = config_checks.problems(
            config.parse(table if per_round is None else {**table, "per_round": per_round}), 1
        )
        assert problem.field == "per_round"
        assert problem.message.endswith("but about 7 are available at a time. Write 7.")
        assert not list(config_checks.problems(config.parse({**table, "per_round": 7}), 1))
