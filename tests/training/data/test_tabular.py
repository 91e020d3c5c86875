"""Test tables: rows used for training, stored next to their labels, and generated tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from training.data import Task
from training.federation import config, config_checks
from training.recipes import tabular


def built(source: str, **options: object) -> tuple[Task, Path]:
    path = tabular.prepare(Path(), source=source).path  # type: ignore[arg-type]
    return tabular.build(path, **options), path  # type: ignore[arg-type]


@pytest.mark.parametrize(("source", "rows"), [("digits", 1797), ("breast_cancer", 569), ("wine", 178)])
@pytest.mark.parametrize("held_out", [0, 2, 6])
def test_labels_are_those_of_the_samples(source: str, rows: int, held_out: int) -> None:
    task, path = built(source, held_out=held_out)
    labels = tabular.labels(path, held_out=held_out)
    stored = -(-rows // held_out) if held_out else 0
    assert task.samples == {"train": rows - stored, "validation": stored}
    for split in ("train", "validation"):
        _, targets = task.batch(split, np.arange(task.samples[split]))
        assert targets.tolist() == labels.by_split[split].tolist()


def test_each_row_of_the_file_is_there_once() -> None:
    task, path = built("wine", held_out=5)
    rows = [task.batch(split, np.arange(many))[0] for split, many in task.samples.items()]
    whole = tabular.build(path, held_out=0).batch("train", np.arange(178))[0]
    together = torch.cat(rows)
    assert together.shape == whole.shape
    # Standardised over other rows, a column is the same but for its place and its scale.
    order = np.concatenate([np.flatnonzero(np.arange(178) % 5), np.arange(0, 178, 5)])
    for column in range(whole.shape[1]):
        pairs = torch.stack([together[:, column], whole[order, column]])
        assert torch.corrcoef(pairs)[0, 1] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("samples", [2, 100, tabular.BLOCK, 2 * tabular.BLOCK + 3])
def test_a_made_up_table_is_the_same_in_any_precision_and_standardised(samples: int) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            task, _ = built("synthetic", samples=samples, features=3, held_out=6)
        finally:
            torch.set_default_dtype(torch.float32)
        rows, targets = task.batch("train", np.arange(task.samples["train"]))
        assert rows.dtype == targets.dtype == dtype
        found.append((rows.double(), targets.double()))
    for item, other in zip(*found, strict=True):
        torch.testing.assert_close(item, other, rtol=1e-5, atol=1e-5)
    rows, _ = found[1]
    torch.testing.assert_close(rows.mean(dim=0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    if len(rows) > 1:
        torch.testing.assert_close(rows.std(dim=0, correction=0), torch.ones(3, dtype=torch.float64))


def test_a_made_up_table_is_linear_in_its_rows_but_for_the_noise() -> None:
    task, _ = built("synthetic", samples=5000, features=4, noise=0.1, held_out=0)
    rows, targets = task.batch("train", np.arange(5000))
    with_ones = torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
    left = targets - with_ones @ torch.linalg.lstsq(with_ones, targets[:, None]).solution[:, 0]
    assert float(left.std()) == pytest.approx(0.1, rel=0.05)


def test_nothing_to_train_on_is_refused() -> None:
    request = config.parse({"recipe": "tabular", "tabular": {"held_out": 1}})
    (problem,) = config_checks.problems(request, 1)
    assert problem.field == "tabular.held_out"
    assert "no row for training" in problem.message
