"""Test text in a federation: each package's texts stay with one client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.federated.texts import (
    WORDS,
    Federation,
    cache,
    mean_losses,
    rounds_of,
    stored,
    table,
    write_texts,
    write_weights,
)
from training import contracts
from training.config.base import ConfigError
from training.corpus import owners
from training.engine import initialization
from training.federated.stacking import STACKED_PARAMETERS
from training.federation import data_division
from training.weights.llama import reader
from training.weights.weight_files import open_weights


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


def test_clients_are_packages_and_learn(texts: Path, tmp_path: Path) -> None:
    rounds = rounds_of(tmp_path, table(texts))
    federation = rounds.federation
    labels = federation.divided.labels
    assert set(labels.owner_names) == WORDS.keys() == set(federation.divided.names)
    for client, ids in enumerate(federation.divided.train):
        assert len(set(labels.by_split["train"][ids].tolist())) == 1, "one package a client"
        (owner,) = set(labels.by_split["train"][ids].tolist())
        assert federation.divided.names[client] == labels.owner_names[owner]
        validation = federation.divided.validation[client]
        assert set(labels.by_split["validation"][validation].tolist()) <= {owner}
    assert rounds.work.unstacked_reason == "", "attention goes through vmap"
    losses = mean_losses(rounds, 3)
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.3
    judged = rounds.evaluator.evaluate(rounds.server, should_continue=lambda: True)
    assert judged is not None
    assert judged.means["loss"] < losses[0]
    assert not np.isnan(judged.by_client["loss"]).all()


def test_stacked_clients_come_to_what_each_comes_to_alone(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = rounds_of(tmp_path / "together", table(texts, dtype="fp64"))
    losses = mean_losses(together, 2)
    monkeypatch.setattr("training.federated.stacking.STACKED_PARAMETERS", 100)
    alone = rounds_of(tmp_path / "alone", table(texts, dtype="fp64"))
    assert "more than 100" in alone.work.unstacked_reason
    assert together.federation.model.weights.size < STACKED_PARAMETERS
    assert mean_losses(alone, 2) == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(alone.server.weights, together.server.weights, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("error")  # torch says where it has no rule for stacks
def test_attention_is_stacked_in_half_precision_too(texts: Path, tmp_path: Path) -> None:
    half = rounds_of(tmp_path / "half", table(texts, dtype="bf16"))
    assert half.work.unstacked_reason == ""
    assert half.server.weights.dtype == torch.float32
    whole = rounds_of(tmp_path / "whole", table(texts))
    assert mean_losses(half, 2) == pytest.approx(mean_losses(whole, 2), rel=0.02)


def test_losses_of_samples_have_the_mean_that_it_trains_by(texts: Path, tmp_path: Path) -> None:
    task = rounds_of(tmp_path, table(texts)).federation.model.task
    assert task.score_samples is not None
    batch = task.batch("train", np.arange(6))
    each = task.score_samples(task.model, batch)
    assert each["loss"].shape == (6,)
    torch.testing.assert_close(each["loss"].mean(), task.loss(task.model, batch))


@pytest.mark.parametrize("tied", [False, True])
def test_weights_equal_those_of_the_trainer(tied: bool, texts: Path, tmp_path: Path) -> None:
    """They have the same seed and are equal parameter by parameter; a tied head stays the embedding."""
    rounds = rounds_of(tmp_path, table(texts, seed=5, language={"tied": tied}))
    federation = rounds.federation
    task = contracts.recipe("language").call_build(federation.prepared.path, federation.config.recipe_options())
    for name, parameter in task.model.named_parameters():
        expected = initialization.whole_parameter(task, 5, name, parameter, torch.device("cpu"))
        assert torch.equal(federation.model.task.model.get_parameter(name), expected)
    model = federation.model.task.model
    assert (model.get_parameter("head.weight") is model.get_parameter("tokens.weight")) == tied
    assert ("head.weight" in federation.model.weights.shapes) == (not tied)
    losses = mean_losses(rounds, 2)
    assert losses[1] < losses[0]


def test_it_starts_from_the_weights_that_it_names(texts: Path, tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "llama")
    rounds = rounds_of(tmp_path / "run", table(texts, language={"from_weights": str(weights)}))
    options = rounds.config.recipe_options()
    assert (options["layers"], options["heads"], options["kv_heads"]) == (2, 4, 2), "the sizes come with them"
    assert rounds.base_config.hash() == rounds.config.hash(), "and are the run's from then on"
    read = reader(open_weights(weights))
    for name, value in rounds.federation.model.weights.tensors(rounds.server.weights).items():
        assert torch.equal(value, read(name))


def test_older_shards_explain_why_they_have_no_owners(texts: Path, tmp_path: Path) -> None:
    rounds = rounds_of(tmp_path / "first", table(texts, language={"validation_percent": 21.0}))
    path = rounds.federation.prepared.path / owners.FILE
    path.unlink()
    with pytest.raises(ConfigError, match="Create them again") as refused:
        rounds_of(tmp_path / "second", table(texts, language={"validation_percent": 21.0}))
    assert [problem.field for problem in refused.value.problems] == ["run.split"]
    assert rounds_of(
        tmp_path / "third", table(texts, split="iid", language={"validation_percent": 21.0})
    ).federation.divided.sizes.all()
    assert path.is_relative_to(cache())


def test_validation_is_divided_as_training_is_whatever_the_owners(texts: Path, tmp_path: Path) -> None:
    """An owner's samples belong to everybody in a split that does not go by owners."""
    labels = rounds_of(tmp_path, table(texts)).federation.divided.labels
    config = rounds_of(tmp_path / "iid", table(texts, split="iid")).config
    divided = data_division.divide(config, labels)
    assert all(len(ids) for ids in divided.validation)
    assert len(set(labels.by_split["validation"][divided.validation[0]].tolist())) > 1


@pytest.mark.slow
def test_resumed_or_on_two_ranks_it_is_the_same_model(texts: Path, tmp_path: Path) -> None:
    found = {}
    for name, world, stops in (("one", 1, ()), ("two", 2, ()), ("resumed", 1, (2,)), ("moved", 2, (2,))):
        run = Federation(tmp_path / name, table(texts, rounds=4))
        for rounds in stops:
            run.write(rounds=rounds)
            run.finish(3 - world)
            run.write(rounds=4)
        run.finish(world, resume="step-2" if stops else "")
        found[name] = stored(run.job_dir / "checkpoints" / "step-4"), run.series()
    model, losses = found["one"]
    assert losses[4] < losses[1]
    for other in ("two", "resumed", "moved"):
        assert found[other] == (model, losses)
