"""Test formulas against simulation: intervals, forecasts, the best checkpoint interval, nodes that fail too often."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jobs.reliability import offenders, poisson, save_interval
from jobs.reliability.forecast import DAY_S, Plan, forecast
from jobs.reliability.offenders import NodeFailures
from jobs.reliability.rate import AssumedRate, Rate


def first_order(cost: float, mtbf: float) -> float:
    """C + √(2MC + C²) (arXiv 2410.18124), which lets nothing fail twice: somewhat long where C is not small."""
    return cost + math.sqrt(2 * mtbf * cost + cost * cost)


class TestIntervals:
    @pytest.mark.parametrize(
        ("count", "low", "high"),
        [(0, 0.0, 3.688879), (1, 0.025318, 5.571643), (2, 0.242209, 7.224688), (10, 4.795389, 18.390356),
         (100, 81.363991, 121.626794)],
    )  # fmt: skip
    def test_as_tables_have_them(self, count: int, low: float, high: float) -> None:
        assert poisson.interval(count) == pytest.approx((low, high), abs=1e-6)

    @pytest.mark.parametrize("mean", [0.05, 0.3, 1.0, 2.7, 8.0, 25.0, 90.0, 400.0])
    def test_they_cover_the_truth_95_times_of_100_or_more(self, mean: float) -> None:
        covered = 0.0
        for count in range(int(mean + 12 * math.sqrt(mean) + 20)):
            low, high = poisson.interval(count)
            if low <= mean <= high:
                covered += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
        assert covered >= 0.95

    def test_they_cover_rates_of_simulated_clusters(self) -> None:
        chance = np.random.default_rng(14)
        node_days, rate = 3_000.0, 0.0065
        for_certain = [
            item.low_per_day <= rate <= item.high_per_day
            for item in (Rate(int(count), node_days) for count in chance.poisson(rate * node_days, 4_000))
        ]
        assert np.mean(for_certain) >= 0.95

    @pytest.mark.parametrize("count", [1, 5, 40, 3_000, 200_000])
    def test_tails_add_up(self, count: int) -> None:
        for mean in (0.5 * count, 0.9 * count, count, 1.1 * count, 2.0 * count):
            assert poisson.at_least(count, mean) + poisson.at_most(count - 1, mean) == pytest.approx(1.0, abs=1e-9)

    def test_a_tail_far_out_is_not_rounded_away(self) -> None:
        assert poisson.at_least(30, 1.0) == pytest.approx(1.4331e-33, rel=1e-3)

    def test_of_few_no_mean_time_is_named(self) -> None:
        assert Rate(2, 500.0).mtbf_days is None
        assert Rate(2, 500.0).per_thousand == pytest.approx(4.0)
        assert Rate(4, 500.0).mtbf_days == pytest.approx(125.0)
        assert Rate(0, 0.0).per_thousand is None


def useful_share(period: float, *, cost: float, mtbf: float, restart: float, gaps: np.ndarray) -> float:
    """Return the useful share of a run that fails after each of these gaps; each gap begins with a restart."""
    whole = np.floor(np.maximum(gaps - restart, 0.0) / period)
    return float(np.sum(whole) * (period - cost) / np.sum(gaps))


GRID = [
    (cost, hours * 3600 / nodes)
    for cost in (2.0, 30.0, 240.0)
    for hours in (24.0, 500.0, 3_700.0)
    for nodes in (1, 16, 128, 1_024)
    if cost < 0.2 * hours * 3600 / nodes
]


class TestSaving:
    @pytest.mark.parametrize(("cost", "mtbf"), GRID)
    def test_the_best_period_and_what_it_keeps_as_simulated(self, cost: float, mtbf: float) -> None:
        restart = min(90.0, 0.2 * mtbf)
        gaps = np.random.default_rng(7).exponential(mtbf, 40_000)
        best = save_interval.best_period(cost, mtbf)
        around = best * np.linspace(0.4, 2.5, 211)
        simulated = np.array([useful_share(p, cost=cost, mtbf=mtbf, restart=restart, gaps=gaps) for p in around])
        # The curve is flat at its maximum, so noise would place it: fit a parabola through the top.
        near = simulated > simulated.max() * 0.995
        a, b, _ = np.polyfit(np.log(around[near]), simulated[near], 2)
        assert math.exp(-b / (2 * a)) == pytest.approx(best, rel=0.05)
        report = save_interval.useful_share(best, cost=cost, mtbf=mtbf, restart=restart)
        assert report == pytest.approx(useful_share(best, cost=cost, mtbf=mtbf, restart=restart, gaps=gaps), rel=0.05)
        for period in (best / 3, best * 3):
            report = save_interval.useful_share(period, cost=cost, mtbf=mtbf, restart=restart)
            assert report == pytest.approx(
                useful_share(period, cost=cost, mtbf=mtbf, restart=restart, gaps=gaps), rel=0.05, abs=2e-3
            )

    @pytest.mark.parametrize(("cost", "mtbf"), GRID)
    def test_no_other_period_keeps_more(self, cost: float, mtbf: float) -> None:
        best = save_interval.useful_share(save_interval.best_period(cost, mtbf), cost=cost, mtbf=mtbf)
        for period in (save_interval.young(cost, mtbf), first_order(cost, mtbf), 2 * cost, mtbf):
            assert save_interval.useful_share(period, cost=cost, mtbf=mtbf) <= best + 1e-12

    def test_it_comes_to_youngs_where_a_save_is_cheap(self) -> None:
        assert save_interval.best_period(1.0, 1e6) == pytest.approx(save_interval.young(1.0, 1e6), rel=2e-3)

    def test_what_can_not_get_on_keeps_nothing(self) -> None:
        assert save_interval.useful_share(10.0, cost=10.0, mtbf=100.0) == 0.0
        assert save_interval.useful_share(1e9, cost=1.0, mtbf=1.0) == 0.0


class TestForecast:
    @pytest.mark.parametrize("nodes", [1, 8, 64, 512])
    @pytest.mark.parametrize("days", [1.0, 14.0])
    @pytest.mark.parametrize("per_thousand", [2.34, 6.5, 40.0])
    def test_failures_and_the_chance_of_none_as_simulated(self, nodes: int, days: float, per_thousand: float) -> None:
        found = forecast(Plan(nodes, days, 30.0, 120.0), AssumedRate(per_thousand / 1000))
        chance = np.random.default_rng(nodes)
        # Each node separately, failing at random times.
        first = chance.exponential(1000 / per_thousand, (20_000 if nodes < 500 else 4_000, nodes)).min(axis=1)
        none = np.mean(first > days)
        error = math.sqrt(found.no_failure_probability * (1 - found.no_failure_probability) / len(first))
        assert abs(found.no_failure_probability - none) <= max(0.05 * found.no_failure_probability, 4 * error)
        counts = chance.poisson(per_thousand / 1000 * days, (2_000, nodes)).sum(axis=1)
        error = math.sqrt(found.failures / len(counts))
        assert abs(found.failures - np.mean(counts)) <= max(0.05 * found.failures, 4 * error)
        assert found.mtbf_seconds == pytest.approx(np.mean(first) * DAY_S, rel=0.05)

    def test_the_curve_has_its_top_at_the_best(self) -> None:
        found = forecast(Plan(128, 14.0, 45.0, 300.0), Rate(40, 6_200.0))
        period, most = max(found.curve(), key=lambda point: point[1])
        assert period == pytest.approx(found.best_seconds)
        assert most == pytest.approx(found.best_useful_share)
        low, high = found.no_failure_probability_interval
        assert low < found.no_failure_probability < high
        assert found.failures_low < found.failures < found.failures_high


class TestOffenders:
    def test_a_bad_node_and_a_bad_program_are_distinguished(self) -> None:
        sound = [NodeFailures(f"n{k:02}", k % 2, k % 2, 30.0) for k in range(40)]
        found = offenders.offenders([*sound, NodeFailures("bad", 9, 7, 30.0), NodeFailures("used", 9, 1, 30.0)])
        assert [(item.counts.node, item.is_node) for item in found] == [("bad", True), ("used", False)]
        assert found[0].times > 5
        assert found[0].score > 2

    def test_many_sound_nodes_accuse_none(self) -> None:
        """At most about five of a hundred clusters of 400 sound nodes have an offender."""
        chance = np.random.default_rng(3)
        accused = 0
        for _ in range(100):
            counts = chance.poisson(0.0065 * 30, 400)
            accused += bool(
                offenders.offenders(NodeFailures(f"n{k}", int(c), int(c), 30.0) for k, c in enumerate(counts))
            )
        assert accused <= 6

    def test_two_failures_accuse_nobody(self) -> None:
        assert not offenders.offenders([NodeFailures("a", 2, 2, 0.01), NodeFailures("b", 0, 0, 1e6)])

    def test_a_single_node_is_compared_with_nothing(self) -> None:
        assert not offenders.offenders([NodeFailures("a", 50, 50, 10.0)])
