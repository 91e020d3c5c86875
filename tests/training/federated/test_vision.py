"""Test the recipe vision in a federation, and unchanged without one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.federated.in_process import accuracy, train
from tests.training.federated.texts import rounds_of
from training import contracts
from training.federated.layout import parameters, statistics
from training.federated.model import batch_norm_tensors
from training.federation import config_checks
from training.federation.config import parse
from training.recipes import vision


def task(**options: Any) -> Any:
    torch.manual_seed(0)
    return vision.build(vision.prepare(Path()).path, **options)


def test_nothing_changes_without_its_new_option() -> None:
    """Names, numbers and losses of a run from before."""
    digest = hashlib.sha256()
    for name, value in task().model.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    assert digest.hexdigest()[:16] == "e1cd825fd28fb262"


@pytest.mark.parametrize("batch_norm", [False, True])
def test_losses_of_samples_have_the_mean_that_it_trains_by(batch_norm: bool) -> None:
    created = task(batch_norm=batch_norm, dropout=0.0)
    batch = created.batch("train", np.arange(20))
    each = created.score_samples(created.model, batch)
    score = created.score(created.model, batch)
    assert {name: value.shape for name, value in each.items()} == {"loss": (20,), "accuracy": (20,)}
    torch.testing.assert_close(each["loss"].mean(), created.loss(created.model, batch))
    torch.testing.assert_close({name: value.mean() for name, value in each.items()}, score)


def test_losses_have_the_dtype_of_the_model() -> None:
    created = task(dropout=0.0)
    images, labels = created.batch("train", np.arange(4))
    model, batch = created.model.double(), (images.double(), labels)
    assert created.loss(model, batch).dtype == torch.float64
    assert created.score(model, batch)["loss"].dtype == torch.float64


def test_normalising_layers_are_found_by_name() -> None:
    model = task(batch_norm=True).model
    assert {name for name in parameters(model) if name in batch_norm_tensors(model)} == {
        f"convolutions.{layer}.{part}" for layer in (1, 4) for part in ("weight", "bias")
    }
    assert set(statistics(model)) == {
        f"convolutions.{layer}.running_{part}" for layer in (1, 4) for part in ("mean", "var")
    }
    assert isinstance(model.get_submodule(task().head), torch.nn.Sequential)


def test_the_portal_sees_how_its_data_would_be_divided() -> None:
    labels = config_checks.shipped_labels(parse({"recipe": "vision"}))
    assert labels is not None
    assert labels.names == tuple("0123456789")
    assert {split: len(found) for split, found in labels.by_split.items()} == task().samples
    data = vision.prepare(Path()).path
    built = contracts.recipe("vision").call_build(data, {})
    everything = built.batch("train", np.arange(built.samples["train"]))
    assert (everything[1].numpy() == labels.by_split["train"]).all()


def test_a_federation_on_images_learns(tmp_path: Path) -> None:
    table = {"recipe": "vision", "clients": 6, "split": "dirichlet", "learning_rate": 0.3, "vision": {"channels": 8}}
    rounds = rounds_of(tmp_path, table)
    assert rounds.work.unstacked_reason == ""
    train(rounds, 8)
    assert accuracy(rounds) > 0.5
