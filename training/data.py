"""What a recipe hands to the trainer: its data, made ready, and what is to be trained on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from training.config.dims import Dims

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
Split = Literal["train", "validation"]
Batch = tuple["Tensor", ...]
"""Tensors on the CPU whose first dim is the samples."""


@dataclass(frozen=True)
class Prepared:
    """A recipe's data, ready to be opened by every rank. A checkpoint remembers the identity."""

    path: Path
    identity: str
    vocabulary: int | None = None
    """The size of the tokens' vocabulary, and so of the model's; None: there are no tokens."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """What is worth telling once: how many documents, duplicates, tokens, shards."""


@dataclass(frozen=True)
class Labels:
    """What the samples of a task are, as far as a split over clients goes by it; no torch."""

    of: Mapping[Split, Ids]
    """The label of each sample, a number from 0; all 0 where there are none."""
    names: tuple[str, ...]
    """Of the labels."""
    owners: Mapping[Split, Ids] | None = None
    """To whom each sample belongs by nature: an author, a hospital, a package. None: nobody knows."""
    owner_names: tuple[str, ...] = ()
    unowned: str = ""
    """Why nobody knows, though such data may well tell; with what to do."""


@dataclass(frozen=True)
class Task:
    """What is trained: a recipe's model, its samples and its loss."""

    model: nn.Module
    samples: dict[Split, int]
    batch: Callable[[Split, Ids], Batch]
    """Looks up samples by their ids, and does nothing else: a thread calls it ahead of time (loader.prefetch)."""
    loss: Callable[[Callable[..., Tensor], Batch], Tensor]
    """(model, batch) → mean loss over the samples, a scalar."""
    score: Callable[[Callable[..., Tensor], Batch], dict[str, Tensor]]
    """(model, batch) → means over the samples; "loss" is among them. Reported as validation_<name>."""
    each: Callable[[Callable[..., Tensor], Batch], dict[str, Tensor]] | None = None
    """(model, batch) → (samples,) of each sample: "loss" is among them, whose mean is `loss`; "accuracy" may be. None:
    a sample has no loss of its own."""
    descend: Callable[[nn.Module, Sequence[Batch], float, int, int], float | None] | None = None
    """(model, batches, learning rate, client, round): how a client of a federation trains, where that is its own
    affair; it changes the model in place, and may tell its mean loss. None: by steps of gradient descent."""
    judge: Callable[[nn.Module, Batch], Mapping[str, float]] | None = None
    """(model, all that a client keeps for validation) → its scores by name, where it judges in its own way; "loss" may
    be among them. None: by `each`, or `score`."""
    head: str = ""
    """The module that makes the answer of what the rest has made of the inputs; "": there is no such."""
    initialise: Callable[[str, Tensor, torch.Generator], None] | None = None
    """(name, whole parameter, generator): fills it. A model whose task has one is made without memory, its weights are
    filled once it is cut, the same on every layout; any other model comes with its weights."""
    weights: Callable[[str], Tensor | None] | None = None
    """(name) → the whole parameter as it lies on disk, perhaps in another dtype. None: `initialise` fills it."""
    inputs: Callable[[Batch], Tensor] | None = None
    """batch → what the model is called with. A pipeline, whose first stage has no loss, needs it."""
    dims: Dims | None = None
    unit: str = "samples"
    """What throughput counts: tokens or samples."""
    units_per_sample: int = 1
    facts: dict[str, object] = field(default_factory=dict)
    """What is worth telling once, at the start."""
    show: Callable[[Batch], list[str]] | None = None
    """A batch as people would read it, for what is told of a step that went wrong."""
    by_shard: list[int] = field(default_factory=list)
    """Training samples in each shard of the data, where it has shards."""
