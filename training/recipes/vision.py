"""A small convolutional network on 1,797 handwritten digits of 8 × 8 pixels.

digits.csv.gz: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (the test set), UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49, licensed CC BY 4.0; the copy that scikit-learn ships, unchanged. Each
line has 64 pixels of 0 to 16, row by row, and the digit.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from training.data import Batch, Ids, Labels, Prepared, Split, Task

if TYPE_CHECKING:
    from torch import Tensor

SHIPPED = True
SIZE = 8
VALIDATION_EVERY = 6
"""Every sixth digit is for validation: the file is ordered by writer, so both splits contain all writers."""


def prepare(cache: Path, identity: str | None = None) -> Prepared:
    """Return the data, which comes with the recipe; nothing has to be made."""
    path = Path(__file__).with_name("digits.csv.gz")
    return Prepared(path, f"digits-{hashlib.sha256(path.read_bytes()).hexdigest()[:10]}")


def build(
    data: Path,
    *,
    channels: Annotated[int, "1..256", "Channels of the first convolution; the second has twice as many."] = 16,
    hidden: Annotated[int, "1..4096", "Units of the layer before the last."] = 64,
    dropout: Annotated[float, "0..0.9", "Fraction of the hidden units that is dropped in training."] = 0.1,
    batch_norm: Annotated[bool, "Normalise each convolution's output over the batch."] = False,
) -> Task:
    import torch

    from training.models.digits import Digits

    images, labels = _load(data)
    splits = _splits(len(labels))

    def batch(split: Split, ids: Ids) -> Batch:
        rows = torch.from_numpy(splits[split][ids])
        return images[rows], labels[rows]

    return Task(
        model=Digits(channels, hidden, dropout, batch_norm=batch_norm),
        samples={split: len(rows) for split, rows in splits.items()},
        batch=batch,
        loss=lambda model, batch: _scores_per_sample(model, batch)["loss"].mean(),
        score=lambda model, batch: {name: values.mean() for name, values in _scores_per_sample(model, batch).items()},
        score_samples=_scores_per_sample,
        head="head",
    )


def labels(data: Path) -> Labels:
    """Return the digit of each sample."""
    digits = _read(data)[:, -1].astype(np.int64)
    by_split = {split: digits[rows] for split, rows in _splits(len(digits)).items()}
    return Labels(by_split, tuple(map(str, range(10))))


def _splits(rows: int) -> dict[Split, Ids]:
    is_validation = np.arange(rows) % VALIDATION_EVERY == 0
    return {"train": np.flatnonzero(~is_validation), "validation": np.flatnonzero(is_validation)}


def _scores_per_sample(model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    from torch.nn import functional

    images, labels = batch
    logits = model(images)
    logits = logits.float() if logits.dtype != images.dtype else logits  # autocast's half precision
    loss = functional.cross_entropy(logits, labels, reduction="none")
    return {"loss": loss, "accuracy": (logits.argmax(dim=1) == labels).to(loss.dtype)}


def _load(path: Path) -> tuple[Tensor, Tensor]:
    """Return images (1797, 1, 8, 8), float32 of 0 to 1, and labels (1797,), int64."""
    import torch

    table = torch.from_numpy(_read(path))
    return (table[:, :-1] / 16).reshape(-1, 1, SIZE, SIZE), table[:, -1].long()


def _read(path: Path) -> NDArray[np.float32]:
    """Return (1797, 65): the pixels, 0 to 16, and the digit."""
    with gzip.open(path, "rb") as file:
        values = np.array(file.read().replace(b"\n", b",").rstrip(b",").split(b","), dtype=np.float32)
    return values.reshape(-1, SIZE * SIZE + 1)
