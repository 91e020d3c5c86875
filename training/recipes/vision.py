"""A small convolutional network on 1,797 handwritten digits of 8 × 8 pixels.

digits.csv.gz: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (the test set), UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49, licensed CC BY 4.0; the copy that scikit-learn ships, unchanged. Each
line holds 64 pixels of 0 to 16, row by row, and the digit.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from training.data import Batch, Ids, Prepared, Split, Task

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 8
VALIDATION_EVERY = 6
"""Each sixth digit is kept for validation: the file is ordered by writer, so both splits have all writers."""


def prepare(cache: Path, identity: str | None = None) -> Prepared:
    """The data comes with the recipe; nothing to make."""
    path = Path(__file__).with_name("digits.csv.gz")
    return Prepared(path, f"digits-{hashlib.sha256(path.read_bytes()).hexdigest()[:10]}")


def build(
    data: Path,
    *,
    channels: Annotated[int, "1..256", "Of the first convolution; the second has twice as many."] = 16,
    hidden: Annotated[int, "1..4096", "Units of the layer before the last."] = 64,
    dropout: Annotated[float, "0..0.9", "Part of the hidden units that is silenced in training."] = 0.1,
) -> Task:
    import torch

    from training.models.digits import Digits

    images, labels = _load(data)
    held_out = np.arange(len(labels)) % VALIDATION_EVERY == 0
    splits: dict[Split, Ids] = {"train": np.flatnonzero(~held_out), "validation": np.flatnonzero(held_out)}

    def batch(split: Split, ids: Ids) -> Batch:
        rows = torch.from_numpy(splits[split][ids])
        return images[rows], labels[rows]

    return Task(
        model=Digits(channels, hidden, dropout),
        samples={split: len(rows) for split, rows in splits.items()},
        batch=batch,
        loss=_loss,
        score=_score,
        head="head",
    )


def _loss(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    from torch.nn import functional

    images, labels = batch
    return functional.cross_entropy(model(images).float(), labels)  # autocast does that by itself on a CPU only


def _score(model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    from torch.nn import functional

    images, labels = batch
    logits = model(images).float()
    return {
        "loss": functional.cross_entropy(logits, labels),
        "accuracy": (logits.argmax(dim=1) == labels).float().mean(),
    }


def _load(path: Path) -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8) float32 of 0 to 1, labels (1797,) int64."""
    import torch

    with gzip.open(path, "rb") as file:
        values = np.array(file.read().replace(b"\n", b",").rstrip(b",").split(b","), dtype=np.float32)
    table = torch.from_numpy(values.reshape(-1, SIZE * SIZE + 1))
    return (table[:, :-1] / 16).reshape(-1, 1, SIZE, SIZE), table[:, -1].long()
