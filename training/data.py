"""Define what a recipe provides to the trainer: its data, ready for use, and the task to train on them."""

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
    """A recipe's data, ready to be opened by every rank. Checkpoints store the identity."""

    path: Path
    identity: str
    vocabulary: int | None = None
    """Size of the tokens' vocabulary, and so of the model's; None: there are no tokens."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Facts that are reported once: numbers of documents, duplicates, tokens, shards."""


@dataclass(frozen=True)
class Labels:
    """Labels of a task's samples, as far as a split over clients uses them; no torch."""

    by_split: Mapping[Split, Ids]
    """The label of each sample, a number from 0; all 0 if there are none."""
    names: tuple[str, ...]
    """Names of the labels."""
    owners: Mapping[Split, Ids] | None = None
    """The natural owner of each sample: an author, a hospital, a package. None: unknown."""
    owner_names: tuple[str, ...] = ()
    unowned: str = ""
    """Why the owners are unknown although such data may have some, with what to do."""

    @property
    def of(self) -> Mapping[Split, Ids]:
        """Return `by_split`. Deprecated: split.py files of earlier releases use it."""
        return self.by_split


@dataclass(frozen=True)
class Task:
    """What is trained: a recipe's model, its samples and its loss."""

    model: nn.Module
    samples: dict[Split, int]
    batch: Callable[[Split, Ids], Batch]
    """(split, ids) → the samples. It has no side effects, as a thread calls it ahead of time (loader.prefetch)."""
    loss: Callable[[Callable[..., Tensor], Batch], Tensor]
    """(model, batch) → mean loss over the samples, a scalar."""
    score: Callable[[Callable[..., Tensor], Batch], dict[str, Tensor]]
    """(model, batch) → means over the samples; "loss" is among them. Reported as validation_<name>."""
    score_samples: Callable[[Callable[..., Tensor], Batch], dict[str, Tensor]] | None = None
    """(model, batch) → values per sample (samples,): "loss", whose mean is `loss`, and perhaps "accuracy". None: the
    loss is not defined for single samples."""
    descend: Callable[[nn.Module, Sequence[Batch], float, int, int], float | None] | None = None
    """(model, batches, learning rate, client, round): trains a federation's client in its own way. It changes the model
    in place and may return its mean loss. None: train by gradient descent."""
    evaluate: Callable[[nn.Module, Batch], Mapping[str, float]] | None = None
    """(model, a client's whole validation data) → scores by name, perhaps including "loss", where a client evaluates in
    its own way. None: by `score_samples`, or `score`."""
    head: str = ""
    """The module that computes the output from features that the rest of the model computes; "": there is none."""
    initialise: Callable[[str, Tensor, torch.Generator], None] | None = None
    """(name, whole parameter, generator): fills a parameter. With it, the model is created without memory, and filled
    once it is split, the same on every layout; without it, the model comes with its weights."""
    weights: Callable[[str], Tensor | None] | None = None
    """(name) → the whole parameter as stored on disk, perhaps in another dtype. None: `initialise` fills it."""
    inputs: Callable[[Batch], Tensor] | None = None
    """batch → the model's argument. Required for a pipeline, whose first stage has no loss."""
    dims: Dims | None = None
    unit: str = "samples"
    """Unit of throughput: tokens or samples."""
    units_per_sample: int = 1
    facts: dict[str, object] = field(default_factory=dict)
    """Facts that are reported once, at the start."""
    show: Callable[[Batch], list[str]] | None = None
    """(batch) → readable text of each sample, for reports about a failed step."""
    by_shard: list[int] = field(default_factory=list)
    """Number of training samples in each shard of the data, if it has shards."""
