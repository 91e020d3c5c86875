"""Load a user's client.py as a recipe: its model, each client's data, and its loss, training and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from training.config.choices import Value
from training.corpus.errors import DataError
from training.data import Batch, Ids, Labels, Prepared, Split, Task
from training.federated.custom import client_data
from training.federated.custom.client_data import SPLITS, StoredClientData
from training.federated.custom.user_code import UserCode, UserFunctions
from training.federation.tables import QUANTILES, RoundSeries

FUNCTIONS = ("model", "data", "loss", "train", "evaluate", "name")
PROVIDED = {"train": ("client", "round")}
"""Arguments that a function receives only if it has parameters of these names."""
MAX_LABELS = 256
"""Distinct integer labels up to which they are taken for classes, by which the split is drawn."""
MAX_SCORES, NAME_CHARACTERS = 20, 64
RESERVED_SERIES = frozenset({
    *("step", "self", "validation_loss"),
    *(field.name for field in fields(RoundSeries) if field.name != "loss"),  # that of evaluate() is the validation's
    *(f"client_{what}_{quantile}" for what in ("loss", "accuracy") for quantile in QUANTILES),
})  # fmt: skip
"""Names of series that Vigil reports itself (training.federated.round_report); `step` and `self` are the reporter's
arguments."""


class CustomClient:
    """The functions of client.py with the run's options."""

    def __init__(self, user_code: UserCode, *, clients: int, options: Mapping[str, Value]) -> None:
        given = {name: value for name, value in options.items() if name != "held_out"}
        self._functions = UserFunctions(
            user_code, "entry", names=FUNCTIONS, required=("model", "data"), options=given, provided=PROVIDED
        )
        self._user_code, self._clients, self._options = user_code, clients, sorted(given.items())

    def prepare(self, identity: str | None, *, holdout_interval: int, report: Callable[..., None]) -> Prepared:
        """Load the clients' data, or call data() for each client and store them.

        DataError if they differ from the data `identity` that the checkpoint was trained on.
        """
        folder = self._user_code.data_folder(self._clients, holdout_interval, self._options)
        found = client_data.load(folder) or client_data.store(
            folder,
            lambda client: self._functions.call("data", client),
            (lambda client: self._functions.call("name", client)) if "name" in self._functions else None,
            clients=self._clients,
            holdout_interval=holdout_interval,
            report=report,
        )
        if identity is not None and identity != found.identity:
            raise DataError(
                f"{self._functions.file} returns different data from what the checkpoint was trained on "
                f"({found.identity}, not {identity}). Start over, or restore the earlier data."
            )
        return Prepared(folder, found.identity)

    def labels(self, data: Path) -> Labels:
        found = _stored(data)
        owners = {split: found.owners(split) for split in SPLITS}
        names = found.names or tuple(f"client {client}" for client in range(self._clients))
        last = {split: found.tensors(split)[-1] for split in SPLITS}
        nothing = Labels({split: np.zeros_like(owners[split]) for split in SPLITS}, ("sample",), owners, names)
        if last["train"].is_floating_point() or last["train"].dim() != 1:
            return nothing
        values, places = np.unique(torch.cat([last[split] for split in SPLITS]).numpy(), return_inverse=True)
        if len(values) > MAX_LABELS:
            return nothing
        train = len(last["train"])
        labels_by_split: dict[Split, Ids] = {
            "train": places[:train].astype(np.int64),
            "validation": places[train:].astype(np.int64),
        }
        return Labels(labels_by_split, tuple(map(str, values.tolist())), owners, names)

    def task(self, data: Path) -> Task:
        found = _stored(data)
        parts = {split: found.tensors(split) for split in SPLITS}
        model = self._functions.call("model")
        if not isinstance(model, nn.Module):
            raise DataError(f"model() returns a {type(model).__name__}, not a torch.nn.Module.")
        if odd := [name for name, value in model.state_dict().items() if value.is_complex()]:
            raise DataError(
                f"{odd[0]} of the model has complex numbers. Store real and imaginary parts as separate tensors."
            )
        if shared := [name for name, value in model.named_buffers() if _shares_memory(value)]:
            text = f"the buffer {shared[0]} of the model holds several numbers in one place, as expand() leaves it."
            raise DataError(f"{self._functions.file}: {text} Write expand(…).clone().")
        score_samples = self._custom_loss if "loss" in self._functions else _default_loss(parts["train"])

        def batch(split: Split, ids: Ids) -> Batch:
            wanted = torch.from_numpy(ids)
            return tuple(part[wanted] for part in parts[split])

        return Task(
            model=model,
            samples={split: sum(found.sizes[split]) for split in SPLITS},
            batch=batch,
            loss=lambda model, batch: score_samples(model, batch)["loss"].mean(),
            score=lambda model, batch: {name: values.mean() for name, values in score_samples(model, batch).items()},
            score_samples=score_samples,
            head=self._head(model),
            descend=self._train if "train" in self._functions else None,
            evaluate=self._evaluate if "evaluate" in self._functions else None,
        )

    def _head(self, model: nn.Module) -> str:
        head = getattr(self._functions.module, "HEAD", "")
        if head and head not in dict(model.named_modules()):
            raise DataError(f"HEAD is {head!r}, but the model has no such module.")
        return str(head)

    def _custom_loss(self, model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
        found = self._functions.call("loss", model, *batch)
        if not isinstance(found, Tensor) or found.shape != (len(batch[0]),):
            returned = f"tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            text = f'loss() returns a {returned}, not the loss of each of {len(batch[0])} samples: reduction="none".'
            raise DataError(text)
        return {"loss": found}

    def _train(
        self, model: nn.Module, batches: Sequence[Batch], learning_rate: float, client: int, round_: int
    ) -> float | None:
        result = self._functions.call("train", model, batches, learning_rate, client=client, round=round_)
        return None if result is None else _number(result, "train()", "the mean loss")

    def _evaluate(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        scores = self._functions.call("evaluate", model, *batch)
        if not isinstance(scores, Mapping) or not 1 <= len(scores) <= MAX_SCORES:
            raise TypeError(f'evaluate() returns a {type(scores).__name__}, not a dict such as {{"accuracy": 0.9}}')
        if invalid := [name for name in scores if not _is_name(name)]:
            raise TypeError(f"evaluate() returns a score called {invalid[0]!r:.100}. Use a short name, like accuracy")
        if reserved := sorted(name for name in scores if name in RESERVED_SERIES or name.startswith("finetuned_")):
            raise TypeError(f"evaluate() returns a score called {reserved[0]!r}, a name that Vigil uses. Use another")
        return {name: _number(value, "evaluate()", name) for name, value in scores.items()}


def _shares_memory(value: Tensor) -> bool:
    """Return whether several of its numbers share one place in memory: such a tensor cannot be filled with others."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return 0 not in value.shape and reach < value.numel()


def _stored(folder: Path) -> StoredClientData:
    found = client_data.load(folder)
    if found is None:
        raise DataError(f"{folder} with the clients' data is missing. Start the run again.")
    return found


def _default_loss(parts: tuple[Tensor, ...]) -> Callable[[Callable[..., Tensor], Batch], dict[str, Tensor]]:
    """Return the default loss: cross entropy for integer labels, half the squared error for others."""
    if len(parts) < 2:
        raise DataError("data() returns inputs without labels. Return labels after them, or write loss(model, inputs).")
    return _squared_errors if parts[-1].is_floating_point() else _cross_entropies


def _cross_entropies(model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    *inputs, labels = batch
    logits = _logits(model(*inputs))
    labels = labels.long()
    if logits.dim() != 2 or labels.dim() != 1:
        shapes = f"{tuple(logits.shape)} for labels {tuple(labels.shape)}"
        raise DataError(f"The model returns {shapes}, not (samples, classes) for (samples,). Write loss(model, …).")
    loss = functional.cross_entropy(logits, labels, reduction="none")
    return {"loss": loss, "accuracy": (logits.argmax(dim=-1) == labels).to(loss.dtype)}


def _squared_errors(model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    *inputs, values = batch
    found = _logits(model(*inputs))
    if found.numel() != values.numel():
        shapes = f"{tuple(found.shape)} for values {tuple(values.shape)}"
        text = f"The model returns {shapes}, which the default loss compares one to one."
        raise DataError(f"{text} Write loss(model, …) for another.")
    return {"loss": (found.reshape(values.shape) - values).square().reshape(len(values), -1).mean(dim=1) / 2}


def _logits(found: Any) -> Tensor:
    """Return the model's output, or the `logits` of an output of transformers' models."""
    found = getattr(found, "logits", found)
    if not isinstance(found, Tensor):
        raise DataError(f"The model returns a {type(found).__name__}, not a tensor. Write loss(model, …).")
    return found


def _number(value: Any, function: str, name: str) -> float:
    """Return a number of Python, numpy or torch as a float; TypeError for anything with more than one number.

    `function` returned it as `name`.
    """
    if not isinstance(value, Tensor | np.ndarray | np.generic | int | float):
        raise TypeError(f"{function} returns a {type(value).__name__} as {name}, not a number")
    if (shape := np.shape(value)) and math.prod(shape) != 1:
        kind = f"{type(value).__name__} of shape {tuple(shape)}"
        raise TypeError(f"{function} returns a {kind} as {name}, not a number")
    return float(value)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and name.isascii() and len(name) <= NAME_CHARACTERS
