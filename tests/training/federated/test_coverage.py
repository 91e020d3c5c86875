"""Test data that no round has counted: forecast, recorded over resumes, reported, and refused at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.federated.in_process import RecordingReporter, run, start
from training.federated.coverage import CoverageError, CoverageLog
from training.federation import config_checks, coverage_forecast, data_division
from training.federation.config import parse
from training.federation.coverage_forecast import CoverageForecast, forecast
from training.federation.tables import Coverage
from training.manifest import committed

SUBSET: dict[str, Any] = {
    **{
        "recipe": "tabular",
        "clients": 7,
        "rounds": 20,
        "split": "quantity",
        "learning_rate": 0.3,
        "validate_every": 20,
        "seed": 5,
    },
    **{"pace": "deadline", "deadline": {"quantile": 0.3, "late": "drop"}},
}


@pytest.fixture(autouse=True)
def _unlimited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a forecast plan all rounds, however busy the machine is."""
    monkeypatch.setattr(coverage_forecast, "MAX_SECONDS", float("inf"))


def foreseen(table: dict[str, Any]) -> CoverageForecast:
    config = parse(table)
    labels = config_checks.shipped_labels(config)
    assert labels is not None
    return forecast(config, data_division.divide(config, labels).sizes)


def reported(reporter: RecordingReporter) -> Coverage:
    found = Coverage.unpack(reporter.of("round.clients")[-1]["coverage"])
    assert found is not None
    return found


def test_a_run_over_a_subset_reports_it(tmp_path: Path) -> None:
    """Large clients are the slow ones, so most of the data may lie with those that no round waits for."""
    run(tmp_path, SUBSET, reporter=(reporter := RecordingReporter()))
    found = reported(reporter)
    assert found.text == "3 of 7 clients never counted, 54 % of samples."
    assert found.excluded == 3
    assert found.foremost[0] == 0, "the largest of all"
    assert set(foreseen(SUBSET).excluded.tolist()) == set(found.foremost)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"seed": 4, "clients": 12, "per_round": 6},
        {"seed": 2, "clients": 12, "deadline": {"quantile": 0.2, "late": "use"}, "rounds": 3},
        {"seed": 1, "clients": 12, "algorithm": "fedprox", "deadline": {"quantile": 0.1, "quorum": 0.1}, "rounds": 4},
        {"seed": 3, "clients": 12, "pace": "asynchronous", "deadline": None, "rounds": 8},
        {"seed": 5, "clients": 12, "per_round": 4, "selection": "availability"},
    ],
)
def test_the_forecast_is_what_happens(change: dict[str, Any], tmp_path: Path) -> None:
    table = {name: value for name, value in {**SUBSET, "validate_every": 0, **change}.items() if value is not None}
    loop = run(tmp_path, table)
    counted = loop.coverage._counted
    assert foreseen(table).excluded.tolist() == np.flatnonzero(loop.coverage._selected & ~counted).tolist()
    assert foreseen(table).never_selected == int((~loop.coverage._selected).sum())


def test_it_goes_on_over_a_resume(tmp_path: Path) -> None:
    run(tmp_path, {**SUBSET, "rounds": 6})
    more = {"rounds": 7, "pace": "rounds", "per_round": 1}
    table = {name: value for name, value in {**SUBSET, **more}.items() if name != "deadline"}
    before = set(foreseen({**SUBSET, "rounds": 6}).excluded.tolist())
    loop = run(tmp_path, table)
    after = set(np.flatnonzero(~loop.coverage._counted).tolist())
    assert after <= before
    assert len(before) - len(after) <= 1


def test_what_a_checkpoint_does_not_contain_is_not_guessed() -> None:
    log = CoverageLog(np.array([5, 6, 7]))
    log.load_state_dict({})
    log.record(np.array([1]), np.array([1]))
    assert log.coverage is None
    log.check(1.0)
    assert log.state_dict() == {}


def test_a_site_may_require_a_minimum_share(tmp_path: Path) -> None:
    """The run ends as failed, with all that it has learnt in a checkpoint; with other clients it can go on."""
    for least, failed in ((0.45, False), (0.6, True)):
        loop = start(tmp_path / str(least), SUBSET, reporter=(reporter := RecordingReporter()))
        loop._least_share = least
        if failed:
            with pytest.raises(
                CoverageError, match=r"3 of 7 clients never counted, 54 % of samples\. This site .* 60 %"
            ):
                loop.run()
        else:
            assert loop.run()
        assert len(reporter.of("run.completed")) == 1 - failed
        assert committed(tmp_path / str(least) / "job" / "checkpoints")[-1].step == 20
        assert reported(reporter).never == 3


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"never": 0, "excluded": 0, "never_samples": 0}, ""),
        ({"never": 3, "excluded": 3, "never_samples": 4}, "3 of 1,000 clients never counted, under 1 % of samples."),
        (
            {"never": 850, "excluded": 0, "never_samples": 850_000},
            "850 of 1,000 clients never counted, 85 % of samples (850 were never selected).",
        ),
    ],
)
def test_coverage_is_described_in_a_sentence(result: dict[str, int], text: str) -> None:
    found = Coverage(clients=1000, samples=1_000_000, foremost=(), **result)
    assert found.text == text
    assert Coverage.unpack(found.pack()) == found


@pytest.mark.parametrize(
    "change", [{"never": 8}, {"samples": -1}, {"foremost": "all"}, {"foremost": [1.5]}, {"never": True}]
)
def test_what_we_never_pack_is_not_read(change: dict[str, Any]) -> None:
    right = Coverage(clients=7, never=3, excluded=3, samples=10, never_samples=5, foremost=(1,)).pack()
    assert Coverage.unpack({**right, **change}) is None
    assert Coverage.unpack(None) is None
