"""A small network or a linear model on a table: digits, tumours or wines as shipped, or a made-up regression.

digits.csv.gz: see training.recipes.vision.
breast_cancer.csv.gz: W. Wolberg, O. Mangasarian, N. Street and W. Street, Breast Cancer Wisconsin (Diagnostic), UCI
Machine Learning Repository, 1993, https://doi.org/10.24432/C5DW2B, licensed CC BY 4.0.
wine.csv.gz: S. Aeberhard and M. Forina, Wine, UCI Machine Learning Repository, 1992, https://doi.org/10.24432/C5PC7J,
licensed CC BY 4.0.
The copies that scikit-learn ships, unchanged. The first line of the latter two holds the number of rows and of
features, and the labels' names; each other line the features, and the label.
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

    from training.config.asked import Asked

SHIPPED = True
FIRST = ("source", "model", "hidden")
SYNTHETIC = "synthetic"
DIGITS = "digits"
COLUMNS = 8


@dataclass(frozen=True)
class Table:
    """Rows of features, standardised over the training rows, and what is to be told from them."""

    features: NDArray[np.float64]
    """(rows, features)."""
    targets: NDArray[np.float64]
    """(rows,): a label's number, or a value."""
    labels: tuple[str, ...]
    """Empty: the targets are values."""


def prepare(
    cache: Path,
    identity: str | None = None,
    *,
    source: Annotated[
        Literal["digits", "breast_cancer", "wine", "synthetic"],
        "digits: 1,797 of 8 × 8 pixels; breast_cancer: 569 tumours, 30 measures, benign or not; wine: 178 of three "
        "kinds, 13 measures; synthetic: a linear regression made up by its options.",
    ] = "digits",
) -> Prepared:
    """The data come with the recipe; nothing to make."""
    folder = Path(__file__).parent
    if source == SYNTHETIC:
        return Prepared(folder / SYNTHETIC, SYNTHETIC)
    path = folder / f"{source}.csv.gz"
    return Prepared(path, f"{source}-{hashlib.sha256(path.read_bytes()).hexdigest()[:10]}")


def check(config: Asked, shape: Shape) -> Iterator[Misfit]:
    """What can't work together."""
    options = config.recipe_options()
    values = options.get("source") == SYNTHETIC
    if values and options.get("model") == "logistic":
        yield Misfit("tabular.model", 'is "logistic", but a regression has no classes. Write "linear" or "mlp".')
    if not values and options.get("model") == "linear":
        yield Misfit("tabular.model", 'is "linear", for values; these are classes. Write "logistic" or "mlp".')


def labels(data: Path, *, held_out: int = 6, samples: int = 2000, **options: object) -> Labels:
    """By class; of a regression all are alike."""
    kept = splits(_rows(data, samples), held_out)
    if data.name == SYNTHETIC:
        return Labels({split: np.zeros(len(rows), dtype=np.int64) for split, rows in kept.items()}, ("value",))
    table = _read(data)
    return Labels({split: table.targets[rows].astype(np.int64) for split, rows in kept.items()}, table.labels)


def build(
    data: Path,
    *,
    model: Annotated[
        Literal["mlp", "logistic", "linear"],
        "mlp: one hidden layer; logistic: logistic regression, one weight a feature where there are two classes; "
        "linear: least squares.",
    ] = "mlp",
    hidden: Annotated[int, "1..65536", "Units of the mlp's hidden layer."] = 64,
    batch_norm: Annotated[bool, "The mlp's hidden layer is normalised over the batch."] = False,
    held_out: Annotated[int, "0..100", "Each row of so many is kept for validation; 0: none."] = 6,
    samples: Annotated[int, "2..10000000", "Rows of the synthetic regression."] = 2000,
    features: Annotated[int, "1..10000", "Columns of the synthetic regression."] = 16,
    noise: Annotated[float, "0..1000", "Deviation of its values from a linear function of its rows."] = 0.1,
) -> Task:
    import torch

    table = _made_up(samples, features, noise) if data.name == SYNTHETIC else _read(data)
    kept = splits(len(table.targets), held_out)
    features_of_all = table.features if data.name == SYNTHETIC else table.features.copy()  # others read what was read
    standardised = _standardised(features_of_all, kept["train"], pixels=data.stem.startswith(DIGITS))
    rows = torch.from_numpy(standardised).to(torch.get_default_dtype())
    targets = torch.from_numpy(table.targets)
    targets = targets.long() if table.labels else targets.to(rows.dtype)

    def batch(split: Split, ids: Ids) -> Batch:
        wanted = torch.from_numpy(kept[split][ids])
        return rows[wanted], targets[wanted]

    is_binary = model == "logistic" and len(table.labels) == 2
    outputs = 1 if is_binary or not table.labels else len(table.labels)
    each = _of_two if is_binary else _of_classes if table.labels else _of_values
    return Task(
        model=_model(model, rows.shape[1], hidden, outputs, batch_norm=batch_norm),
        samples={split: len(found) for split, found in kept.items()},
        batch=batch,
        loss=lambda model, batch: each(model, batch)["loss"].mean(),
        score=lambda model, batch: {name: values.mean() for name, values in each(model, batch).items()},
        each=each,
        head="head" if model == "mlp" else "",
    )


def splits(rows: int, held_out: int) -> dict[Split, Ids]:
    """The numbers of the rows to train on, and of those kept for validation."""
    if not held_out:
        return {"train": np.arange(rows), "validation": np.arange(0)}
    kept = np.arange(rows) % held_out == 0
    return {"train": np.flatnonzero(~kept), "validation": np.flatnonzero(kept)}


def _model(kind: str, features: int, hidden: int, outputs: int, *, batch_norm: bool) -> nn.Module:
    from training.models.tabular import Linear, Perceptron

    return Perceptron(features, hidden, outputs, batch_norm=batch_norm) if kind == "mlp" else Linear(features, outputs)


def _of_two(model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    from torch.nn import functional

    rows, targets = batch
    logits = model(rows).squeeze(-1)
    loss = functional.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")
    return {"loss": loss, "accuracy": ((logits > 0) == targets.bool()).to(logits.dtype)}


def _of_classes(model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    from torch.nn import functional

    rows, targets = batch
    logits = model(rows)
    logits = logits.float() if logits.dtype != rows.dtype else logits  # autocast's half precision
    loss = functional.cross_entropy(logits, targets, reduction="none")
    return {"loss": loss, "accuracy": (logits.argmax(dim=-1) == targets).to(loss.dtype)}


def _of_values(model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    rows, targets = batch
    return {"loss": (model(rows).squeeze(-1) - targets).square() / 2}


def _rows(data: Path, samples: int) -> int:
    return samples if data.name == SYNTHETIC else len(_read(data).targets)


@functools.lru_cache(maxsize=4)
def _read(path: Path) -> Table:
    with gzip.open(path, "rb") as file:
        text = file.read()
    names: tuple[str, ...] = tuple(map(str, range(10)))
    if not path.name.startswith(DIGITS):
        head, _, text = text.partition(b"\n")
        names = tuple(head.decode().strip().split(",")[2:])
    lines = text.count(b"\n")
    values = np.array(text.replace(b"\n", b",").rstrip(b",").split(b","), dtype=np.float64).reshape(lines, -1)
    return Table(values[:, :-1], values[:, -1], names)


def _made_up(rows: int, features: int, noise: float) -> Table:
    draw = np.random.RandomState(0)  # the only one of numpy's whose numbers are promised never to change
    values = draw.standard_normal((rows, features))
    weights = draw.standard_normal(features)
    return Table(values, values @ weights + noise * draw.standard_normal(rows), ())


def _standardised(values: NDArray[np.float64], train: Ids, *, pixels: bool) -> NDArray[np.float64]:
    """The values, changed in place: mean 0 and deviation 1 over the training rows; pixels, of which some are never lit,
    from 0 to 1. A few columns at a time: a large table is there once."""
    if pixels:
        values /= 16
        return values
    for begin in range(0, values.shape[1], COLUMNS):
        columns = values[:, begin : begin + COLUMNS]
        of = columns[train]
        deviation = of.std(axis=0)
        columns -= of.mean(axis=0)
        columns /= np.where(deviation > 0, deviation, 1.0)
    return values
