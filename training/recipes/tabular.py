"""A small network or a linear model on a table: digits, tumours or wines as shipped, or a synthetic regression.

digits.csv.gz: see training.recipes.vision.

breast_cancer.csv.gz: W. Wolberg, O. Mangasarian, N. Street and W. Street, Breast Cancer Wisconsin (Diagnostic), UCI
Machine Learning Repository, 1993, https://doi.org/10.24432/C5DW2B, licensed CC BY 4.0.

wine.csv.gz: S. Aeberhard and M. Forina, Wine, UCI Machine Learning Repository, 1992, https://doi.org/10.24432/C5PC7J,
licensed CC BY 4.0.

The copies that scikit-learn ships, unchanged. In the latter two, the first line has the number of rows and of features,
and the labels' names; each other line has the features and the label.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from training.config.shape import Misfit, Shape
from training.data import Batch, Ids, Labels, Prepared, Split, Task

if TYPE_CHECKING:
    from torch import Tensor, nn

    from training.config.base import BaseRunConfig

SHIPPED = True
FIRST = ("source", "model", "hidden")
SYNTHETIC = "synthetic"
DIGITS = "digits"
COLUMNS = 8
"""Columns that are standardised at a time, so that a large table is in memory only once."""
BLOCK = 4096
"""Rows of a synthetic regression that are generated at a time."""


@dataclass(frozen=True)
class LabelledTable:
    """Rows of features, standardised over the training rows, and their targets."""

    features: NDArray[np.floating]
    """(rows, features)."""
    targets: NDArray[np.float64]
    """(rows,): number of a label, or a value."""
    labels: tuple[str, ...]
    """Empty: the targets are values."""


def prepare(
    cache: Path,
    identity: str | None = None,
    *,
    source: Annotated[
        Literal["digits", "breast_cancer", "wine", "synthetic"],
        "digits: 1,797 images of 8 × 8 pixels; breast_cancer: 569 tumours, 30 features, benign or malignant; wine: 178 "
        "wines of three kinds, 13 features; synthetic: a linear regression generated from its options.",
    ] = "digits",
) -> Prepared:
    """Return the data, which comes with the recipe; nothing has to be made."""
    folder = Path(__file__).parent
    if source == SYNTHETIC:
        return Prepared(folder / SYNTHETIC, SYNTHETIC)
    path = folder / f"{source}.csv.gz"
    return Prepared(path, f"{source}-{hashlib.sha256(path.read_bytes()).hexdigest()[:10]}")


def check(config: BaseRunConfig, shape: Shape) -> Iterator[Misfit]:
    """Yield options that cannot work together."""
    options = config.recipe_options()
    is_regression = options.get("source") == SYNTHETIC
    if is_regression and options.get("model") == "logistic":
        yield Misfit("tabular.model", 'is "logistic", but a regression has no classes. Write "linear" or "mlp".')
    if not is_regression and options.get("model") == "linear":
        yield Misfit("tabular.model", 'is "linear", for values; these are classes. Write "logistic" or "mlp".')
    if options.get("held_out") == 1:
        yield Misfit("tabular.held_out", "is 1, which leaves no row for training. Write 0, or at least 2.")


def labels(data: Path, *, held_out: int = 6, samples: int = 2000, **options: object) -> Labels:
    """Return the class of each row; a regression has a single label."""
    if data.name == SYNTHETIC:
        zero = np.zeros(1, dtype=np.int64)  # a single number that all rows share
        return Labels(
            {split: np.broadcast_to(zero, count) for split, count in _sizes(samples, held_out).items()}, ("value",)
        )
    table = _read(data)
    classes = table.targets[_order(len(table.targets), held_out)].astype(np.int64)
    training_rows = _sizes(len(classes), held_out)["train"]
    return Labels({"train": classes[:training_rows], "validation": classes[training_rows:]}, table.labels)


def build(
    data: Path,
    *,
    model: Annotated[
        Literal["mlp", "logistic", "linear"],
        "mlp: one hidden layer; logistic: logistic regression, with one weight per feature if there are two classes; "
        "linear: least squares.",
    ] = "mlp",
    hidden: Annotated[int, "1..65536", "Units of the mlp's hidden layer."] = 64,
    batch_norm: Annotated[bool, "Normalise the mlp's hidden layer over the batch."] = False,
    held_out: Annotated[int, "0..100", "One of this many rows is used for validation; 0: none."] = 6,
    samples: Annotated[int, "2..10000000", "Rows of the synthetic regression."] = 2000,
    features: Annotated[int, "1..10000", "Columns of the synthetic regression."] = 16,
    noise: Annotated[float, "0..1000", "Standard deviation of the values from a linear function of the rows."] = 0.1,
) -> Task:
    import torch

    dtype = torch.get_default_dtype()
    if data.name == SYNTHETIC:
        table = _synthetic(samples, features, noise, torch.empty(0, dtype=dtype).numpy().dtype)
    else:
        unsorted_table = _read(data)
        order = _order(len(unsorted_table.targets), held_out)
        table = LabelledTable(unsorted_table.features[order], unsorted_table.targets[order], unsorted_table.labels)
    sizes = _sizes(len(table.targets), held_out)
    _standardise(table.features, sizes["train"], pixels=data.stem.startswith(DIGITS))
    rows = torch.from_numpy(table.features).to(dtype)
    targets = torch.from_numpy(table.targets)
    targets = targets.long() if table.labels else targets.to(rows.dtype)
    begins: dict[Split, int] = {"train": 0, "validation": sizes["train"]}

    def batch(split: Split, ids: Ids) -> Batch:
        indices = torch.from_numpy(ids) + begins[split]
        return rows[indices], targets[indices]

    is_binary = model == "logistic" and len(table.labels) == 2
    outputs = 1 if is_binary or not table.labels else len(table.labels)
    score_samples = _binary_scores if is_binary else _class_scores if table.labels else _value_scores
    return Task(
        model=_model(model, rows.shape[1], hidden, outputs, batch_norm=batch_norm),
        samples=sizes,
        batch=batch,
        loss=lambda model, batch: score_samples(model, batch)["loss"].mean(),
        score=lambda model, batch: {name: values.mean() for name, values in score_samples(model, batch).items()},
        score_samples=score_samples,
        head="head" if model == "mlp" else "",
    )


def _sizes(rows: int, held_out: int) -> dict[Split, int]:
    """Return how many rows are for training, and how many for validation."""
    validation = -(-rows // held_out) if held_out else 0
    return {"train": rows - validation, "validation": validation}


def _order(rows: int, held_out: int) -> Ids:
    """Return a file's rows in order of use: those for training, then those for validation, one in `held_out`."""
    numbers = np.arange(rows)
    is_validation = numbers % held_out == 0 if held_out else np.zeros(rows, dtype=bool)
    return np.concatenate([numbers[~is_validation], numbers[is_validation]])


def _model(kind: str, features: int, hidden: int, outputs: int, *, batch_norm: bool) -> nn.Module:
    from training.models.tabular import Linear, Perceptron

    return Perceptron(features, hidden, outputs, batch_norm=batch_norm) if kind == "mlp" else Linear(features, outputs)


def _binary_scores(model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    from torch.nn import functional

    rows, targets = batch
    logits = model(rows).squeeze(-1)
    loss = functional.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")
    return {"loss": loss, "accuracy": ((logits > 0) == targets.bool()).to(logits.dtype)}


def _class_scores(model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    from torch.nn import functional

    rows, targets = batch
    logits = model(rows)
    logits = logits.float() if logits.dtype != rows.dtype else logits  # autocast's half precision
    loss = functional.cross_entropy(logits, targets, reduction="none")
    return {"loss": loss, "accuracy": (logits.argmax(dim=-1) == targets).to(loss.dtype)}


def _value_scores(model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    rows, targets = batch
    return {"loss": (model(rows).squeeze(-1) - targets).square() / 2}


@functools.lru_cache(maxsize=4)
def _read(path: Path) -> LabelledTable:
    with gzip.open(path, "rb") as file:
        text = file.read()
    names: tuple[str, ...] = tuple(map(str, range(10)))
    if not path.name.startswith(DIGITS):
        head, _, text = text.partition(b"\n")
        names = tuple(head.decode().strip().split(",")[2:])
    lines = text.count(b"\n")
    values = np.array(text.replace(b"\n", b",").rstrip(b",").split(b","), dtype=np.float64).reshape(lines, -1)
    return LabelledTable(values[:, :-1], values[:, -1], names)


def _synthetic(rows: int, features: int, noise: float, dtype: np.dtype[np.floating]) -> LabelledTable:
    """Generate a linear regression in float64, whatever dtype it is stored in.

    Runs of either dtype then have the same samples.
    """
    rng = np.random.RandomState(0)  # numpy's only generator that is guaranteed never to change
    weights = rng.standard_normal(features)
    values, targets = np.empty((rows, features), dtype), np.empty(rows)
    for begin in range(0, rows, BLOCK):
        block = rng.standard_normal((min(BLOCK, rows - begin), features))
        values[begin : begin + BLOCK] = block
        targets[begin : begin + BLOCK] = block @ weights + noise * rng.standard_normal(len(block))
    return LabelledTable(values, targets, ())


def _standardise(values: NDArray[np.floating], training_rows: int, *, pixels: bool) -> None:
    """Standardise in place: mean 0 and deviation 1 over the training rows, which come first; pixels to 0 to 1.

    Some pixels are always 0, so they cannot be standardised.
    """
    if pixels:
        values /= 16
        return
    for begin in range(0, values.shape[1], COLUMNS):
        columns = values[:, begin : begin + COLUMNS]
        training = columns[:training_rows]
        deviation = training.std(axis=0, dtype=np.float64)
        columns -= training.mean(axis=0, dtype=np.float64)
        columns /= np.where(deviation > 0, deviation, 1.0)
