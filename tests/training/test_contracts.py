"""Test what modules of recipes/, parallel/, comm/ and federated/*/ provide, and the defaults for what they omit."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import training.parallel
import training.recipes
from training import contracts
from training.config import choices, layout_checks, run_config
from training.config.choices import ChoiceError
from training.config.mesh import shape_of
from training.federation import parts

TAKES = {
    "recipes": contracts.recipe,
    "parallel": contracts.parallelism,
    "comm": contracts.communication,
    "federated.algorithms": parts.algorithm,
    "federated.aggregation": parts.aggregation,
    "federated.selection": parts.selection,
    "federated.split": parts.split,
    "federated.pace": parts.pace,
    "federated.adapters": parts.adapters,
    "federated.filters": parts.filter_,
}
LEAST = """
def prepare(cache, identity=None, *, size: int = 3):
    return (cache, identity, size)

def build(data, *, depth: int = 1):
    return (data, depth)
"""


WITH_OPTIONS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Annotated

def prepare(cache, identity=None, *, size: int = 3):
    return cache

@dataclass(frozen=True)
class Settings:
    depth: Annotated[int, "1..", "Layers."] = 1
    wide: bool = False

def build(data, options: Settings):
    return data, options
"""


def _add(kind: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (folder / "added_here.py").write_text(text)
    monkeypatch.setattr(kind, "__path__", [*kind.__path__, str(folder)])
    monkeypatch.delitem(sys.modules, f"{kind.__name__}.added_here", raising=False)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in TAKES for name in choices.names(kind)])
def test_every_module_keeps_its_contract(kind: str, name: str) -> None:
    TAKES[kind](name)


def test_what_the_least_of_recipes_is_taken_to_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _add(training.recipes, tmp_path, monkeypatch, LEAST)
    least = contracts.recipe("added_here")
    run = run_config.parse({"recipe": "added_here"})
    assert (least.dims(), least.knows_sizes()) == (None, True)
    assert list(least.check(run, shape_of(run, 2))) == []
    assert list(layout_checks.check(run, 2)) == []
    with pytest.raises(ChoiceError, match="needs functions `resolve_options` and `weights`"):
        least.resolve_options(tmp_path)


def test_each_function_is_given_the_options_that_it_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _add(training.recipes, tmp_path, monkeypatch, LEAST)
    least: Any = contracts.recipe("added_here")
    options = {"size": 5, "depth": 7}
    assert least.call_prepare(tmp_path, "sha", options, report_progress=print) == (tmp_path, "sha", 5)
    assert least.call_build(tmp_path, options) == (tmp_path, 7)


def test_a_module_takes_its_options_as_a_dataclass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _add(training.recipes, tmp_path, monkeypatch, WITH_OPTIONS)
    with pytest.raises(run_config.ConfigError, match="run.added_here.depth: is 0. The smallest allowed is 1."):
        run_config.parse({"recipe": "added_here", "added_here": {"depth": 0}})
    options = run_config.parse({"recipe": "added_here", "added_here": {"depth": 2}}).recipe_options()
    assert options == {"size": 3, "depth": 2, "wide": False}
    data, built = contracts.recipe("added_here").call_build(tmp_path, options)  # type: ignore[misc]
    assert (data, built.depth, built.wide) == (tmp_path, 2, False)


def test_a_recipe_that_reports_progress_gets_the_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reporting = LEAST.replace("identity=None", "identity=None, report_progress=None").replace(
        "(cache, identity, size)", "report_progress"
    )
    _add(training.recipes, tmp_path, monkeypatch, reporting)
    created: Any = contracts.recipe("added_here")
    assert created.call_prepare(tmp_path, None, {}, report_progress=print) is print


def test_what_the_least_of_parallelisms_is_taken_to_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _add(training.parallel, tmp_path, monkeypatch, "def apply(model, mesh): return model\n")
    least: Any = contracts.parallelism("added_here")
    batch: Any = object()
    assert least.check(None, option=1) is None
    assert least.divide(batch, None) is batch
    assert least.micro_batches(8, None, option=1) == 1
    assert isinstance(least.no_sync(None), nullcontext)
    assert isinstance(least.step_context(option=1), nullcontext)
    assert (least.forward_backward, least.score, least.optimizer, least.WITHOUT_WEIGHTS) == (None, None, None, False)


def test_a_module_that_lacks_what_all_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _add(training.recipes, tmp_path, monkeypatch, "def build(data): ...\n")
    with pytest.raises(ChoiceError, match=r"added_here\.py: no `prepare`, which every recipe has"):
        contracts.recipe("added_here")
