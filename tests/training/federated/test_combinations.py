"""Test combinations of federation options: invalid ones are refused by field with what works, and the rest runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import training.federated.algorithms
import training.federated.filters
from tests.training.federated.built_in import built_in
from tests.training.federated.in_process import ready, train
from training.config import choices
from training.federation import combinations, config, config_checks
from training.federation.config import FOLDERS

FILTER = "def send(rows, passing):\n    return rows, {}\n\ndef receive(values, beside, passing):\n    return values\n"
ADDED = {
    "sends_more": (training.federated.algorithms, 'SENT = {"delta": "samples", "control": "clients"}'),
    "sends_another": (training.federated.algorithms, 'SENT = {"hessian": "samples"}'),
    "sends_nothing": (training.federated.algorithms, "SENT = {}"),
    "keeps_some": (
        training.federated.algorithms,
        'SENT = {"delta": "samples"}\n\ndef initial_client_state(model):\n    return {"control": model}\n',
    ),
    "has_its_own": (
        training.federated.algorithms,
        'SENT = {"delta": "samples"}\n\ndef personal(model):\n    return ["head"]\n',
    ),
    "hides_all": (training.federated.filters, f"SUM_ONLY = True\n{FILTER}"),
    "hides_none": (training.federated.filters, FILTER),
}
"""Modules as somebody may drop them into a folder, by name."""
ALGORITHM = "\n\ndef train(client):\n    return {}\n\ndef aggregate(server):\n    return server.model\n"
ROBUST = [name for name in choices.names(FOLDERS["aggregation"]) if name != "mean"]


@pytest.fixture(autouse=True)
def _added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in (training.federated.algorithms, training.federated.filters):
        (folder := tmp_path / package.__name__).mkdir()
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        for name, (where, text) in ADDED.items():
            if where is package:
                is_algorithm = package is training.federated.algorithms
                (folder / f"{name}.py").write_text(f'"""Added."""\n\n{text}{ALGORITHM if is_algorithm else ""}')
                monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)


def problems(**table: Any) -> list[tuple[str, str]]:
    parsed = config.parse({"clients": 12, **table})
    return [(problem.field, problem.message) for problem in config_checks.problems(parsed, 1)]


@pytest.mark.parametrize("aggregation", ROBUST)
@pytest.mark.parametrize("algorithm", ["sends_more", "sends_another", "sends_nothing"])
def test_robust_aggregations_need_an_algorithm_that_sends_updates_alone(aggregation: str, algorithm: str) -> None:
    ((field, message),) = problems(aggregation=aggregation, algorithm=algorithm)
    assert field == "aggregation"
    assert message.startswith(f'"{aggregation}" needs each update separately, but "{algorithm}" sends something')
    assert message.endswith('Write aggregation = "mean", or algorithm = "fedavg".')
    assert problems(aggregation="mean", algorithm=algorithm) == []
    assert problems(aggregation=aggregation) == []


@pytest.mark.parametrize("aggregation", ROBUST)
def test_robust_aggregations_refuse_filters_that_hide_updates(aggregation: str) -> None:
    ((field, message),) = problems(aggregation=aggregation, filters=["hides_none", "hides_all"])
    assert field == "aggregation"
    assert message.endswith('Write aggregation = "mean", or filters without it.')
    assert problems(aggregation="mean", filters=["hides_none", "hides_all"]) == []
    assert problems(aggregation=aggregation, filters=["hides_none"]) == []


@pytest.mark.parametrize("algorithm", ["keeps_some", "has_its_own"])
def test_a_server_that_trains_is_no_client_that_keeps(algorithm: str) -> None:
    ((field, message),) = problems(aggregation="fltrust", algorithm=algorithm)
    assert field == "aggregation"
    assert message.endswith('Write aggregation = "median", or algorithm = "fedavg".')
    assert problems(aggregation="median", algorithm=algorithm) == []


@pytest.mark.parametrize("aggregation", ROBUST)
def test_too_few_arrive_at_a_time_where_nobody_waits(aggregation: str) -> None:
    ((field, message),) = problems(aggregation=aggregation, pace="asynchronous", asynchronous={"buffer": 3})
    assert field == "aggregation"
    assert message.endswith('Write aggregation = "mean", or pace = "deadline".')
    assert problems(aggregation=aggregation, pace="deadline", deadline={"quorum": 0.6}) == []


@pytest.mark.parametrize("algorithm", ["fedbuff", "fedasync"])
def test_an_algorithm_for_a_single_pace(algorithm: str) -> None:
    ((field, message),) = problems(algorithm=algorithm)
    assert field == "pace"
    assert message.endswith('Write pace = "asynchronous".')
    assert problems(algorithm=algorithm, pace="asynchronous") == []


def test_each_field_has_a_single_problem_at_a_time() -> None:
    found = problems(aggregation="fltrust", algorithm="sends_more", pace="asynchronous", filters=["hides_all"])
    assert [field for field, _ in found] == ["aggregation"]


@pytest.mark.parametrize("aggregation", built_in("aggregation"))
@pytest.mark.parametrize("selection", ["poisson", "availability"])
def test_what_is_let_through_trains(aggregation: str, selection: str, tmp_path: Path) -> None:
    chosen = {"aggregation": aggregation, "selection": selection, "split": "shift", "pace": "deadline"}
    digits = {"learning_rate": 0.3, "tabular": {"hidden": 16}, "deadline": {"quorum": 0.6}}
    rounds = ready(tmp_path, {**digits, **chosen, "per_round": 12, "clients": 30})
    assert list(config_checks.problems(rounds.config, 1)) == []
    assert len(train(rounds, 2)) == 2


def test_the_documented_table_is_the_code_s() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "federated.md").read_text()
    assert "\n".join(combinations.markdown_list()) in page
    for field in ("aggregation", "selection", "split"):
        assert all(f"`{name}`" in page or name == "mean" for name in choices.names(FOLDERS[field]))
