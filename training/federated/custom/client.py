"""Somebody's client.py as a recipe: the model, each client's data, and what its clients do in their own way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from training.federated.custom.client_data import SPLITS, Kept
from training.federated.custom.program import Functions, Program

FUNCTIONS = ("model", "data", "loss", "train", "evaluate", "name")
PROVIDED = {"train": ("client", "round")}
"""By function the arguments that it is called with only if it names them."""
MOST_LABELS = 256
"""Different whole numbers that are taken for classes, which the picture of the split is by."""
MOST_SCORES, NAME_LETTERS = 20, 64
TOLD = frozenset({
    *("step", "self", "validation_loss", "round_seconds", "step_seconds", "compute_seconds", "wait_seconds"),
    *("transfer_seconds", "client_learning_rate", "mib_up", "mib_down", "trained", "late", "dropped", "rejected"),
    *(f"client_{what}_{of}" for what in ("loss", "accuracy") for of in ("min", "q25", "median", "q75", "max")),
})  # fmt: skip
"""Series that have another meaning (training.federated.round_report)."""


class OwnClient:
    """What client.py defines, with the run's options."""

    def __init__(self, program: Program, *, clients: int, options: Mapping[str, Value]) -> None:
        given = {name: value for name, value in options.items() if name != "held_out"}
        self._functions = Functions(
            program, "entry", names=FUNCTIONS, needed=("model", "data"), options=given, provided=PROVIDED
        )
        self._program, self._clients, self._told = program, clients, sorted(given.items())

    def prepare(self, identity: str | None, *, held_out: int, tell: Callable[..., None]) -> Prepared:
        """Its data, asked for where they are not kept yet. DataError if they are others than the run has had."""
        folder = self._program.data_folder(self._clients, held_out, self._told)
        found = client_data.load(folder) or client_data.make(
            folder,
            lambda client: self._functions.call("data", client),
            (lambda client: self._functions.call("name", client)) if "name" in self._functions else None,
            clients=self._clients,
            held_out=held_out,
            tell=tell,
        )
        if identity is not None and identity != found.identity:
            raise DataError(
                f"{self._functions.file} gives other data than the checkpoint was trained on ({found.identity}, not "
                f"{identity}). Begin anew, or bring them back."
            )
        return Prepared(folder, found.identity)

    def labels(self, data: Path) -> Labels:
        found = _kept(data)
        owners = {split: found.owners(split) for split in SPLITS}
        names = found.names or tuple(f"client {client}" for client in range(self._clients))
        last = {split: found.tensors(split)[-1] for split in SPLITS}
        nothing = Labels({split: np.zeros_like(owners[split]) for split in SPLITS}, ("sample",), owners, names)
        if last["train"].is_floating_point() or last["train"].dim() != 1:
            return nothing
        values, places = np.unique(torch.cat([last[split] for split in SPLITS]).numpy(), return_inverse=True)
        if len(values) > MOST_LABELS:
            return nothing
        train = len(last["train"])
        of: dict[Split, Ids] = {"train": places[:train].astype(np.int64), "validation": places[train:].astype(np.int64)}
        return Labels(of, tuple(map(str, values.tolist())), owners, names)

    def task(self, data: Path) -> Task:
        found = _kept(data)
        parts = {split: found.tensors(split) for split in SPLITS}
        model = self._functions.call("model")
        if not isinstance(model, nn.Module):
            raise DataError(f"model() gives a {type(model).__name__}, not a torch.nn.Module.")
        if odd := [name for name, value in model.state_dict().items() if value.is_complex()]:
            raise DataError(f"{odd[0]} of the model has complex numbers. Hold real and imaginary parts apart.")
        if shared := [name for name, value in model.named_buffers() if _shares_memory(value)]:
            text = f"the buffer {shared[0]} of the model holds several numbers in one place, as expand() leaves it."
            raise DataError(f"{self._functions.file}: {text} Write expand(…).clone().")
        each = self._own_loss if "loss" in self._functions else _usual(parts["train"])

        def batch(split: Split, ids: Ids) -> Batch:
            wanted = torch.from_numpy(ids)
            return tuple(part[wanted] for part in parts[split])

        return Task(
            model=model,
            samples={split: sum(found.sizes[split]) for split in SPLITS},
            batch=batch,
            loss=lambda model, batch: each(model, batch)["loss"].mean(),
            score=lambda model, batch: {name: values.mean() for name, values in each(model, batch).items()},
            each=each,
            head=self._head(model),
            descend=self._descend if "train" in self._functions else None,
            judge=self._judge if "evaluate" in self._functions else None,
        )

    def _head(self, model: nn.Module) -> str:
        head = getattr(self._functions.module, "HEAD", "")
        if head and head not in dict(model.named_modules()):
            raise DataError(f"HEAD is {head!r}, but the model has no such module.")
        return str(head)

    def _own_loss(self, model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
        found = self._functions.call("loss", model, *batch)
        if not isinstance(found, Tensor) or found.shape != (len(batch[0]),):
            gives = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            text = f'loss() gives {gives}, not the loss of each of {len(batch[0])} samples: reduction="none".'
            raise DataError(text)
        return {"loss": found}

    def _descend(
        self, model: nn.Module, batches: Sequence[Batch], learning_rate: float, client: int, round_: int
    ) -> float | None:
        told = self._functions.call("train", model, batches, learning_rate, client=client, round=round_)
        return None if told is None else _number(told, "train() gives as the mean loss")

    def _judge(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        told = self._functions.call("evaluate", model, *batch)
        if not isinstance(told, Mapping) or not 1 <= len(told) <= MOST_SCORES:
            raise TypeError(f'evaluate() gives a {type(told).__name__}, not a dict such as {{"accuracy": 0.9}}')
        if wrong := [name for name in told if not _is_name(name)]:
            raise TypeError(f"evaluate() gives a score called {wrong[0]!r:.100}; take a short name, like accuracy")
        if taken := sorted(name for name in told if name in TOLD or name.startswith("finetuned_")):
            raise TypeError(f"evaluate() gives a score called {taken[0]!r}, which is Vigil's own; take another")
        return {name: _number(value, f"evaluate() gives as {name}") for name, value in told.items()}


def _shares_memory(value: Tensor) -> bool:
    """Return whether two of its numbers may be one in memory: nobody can fill such a tensor with a client's own."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return 0 not in value.shape and reach < value.numel()


def _kept(folder: Path) -> Kept:
    found = client_data.load(folder)
    if found is None:
        raise DataError(f"{folder} is gone, where the clients' data were kept. Start the run again.")
    return found


def _usual(parts: tuple[Tensor, ...]) -> Callable[[Callable[..., Tensor], Batch], dict[str, Tensor]]:
    """The loss where client.py has none: by what the labels are."""
    if len(parts) < 2:
        raise DataError("data() gives inputs alone. Give labels after them, or write loss(model, inputs).")
    return _of_values if parts[-1].is_floating_point() else _of_classes


def _of_classes(model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    *inputs, labels = batch
    logits = _answer(model(*inputs))
    labels = labels.long()
    if logits.dim() != 2 or labels.dim() != 1:
        shapes = f"{tuple(logits.shape)} for labels {tuple(labels.shape)}"
        raise DataError(f"The model gives {shapes}, not (samples, classes) for (samples,). Write loss(model, …).")
    loss = functional.cross_entropy(logits, labels, reduction="none")
    return {"loss": loss, "accuracy": (logits.argmax(dim=-1) == labels).to(loss.dtype)}


def _of_values(model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    *inputs, values = batch
    found = _answer(model(*inputs))
    if found.numel() != values.numel():
        shapes = f"{tuple(found.shape)} for values {tuple(values.shape)}"
        raise DataError(f"The model gives {shapes}: as many of each are compared. Write loss(model, …) for another.")
    return {"loss": (found.reshape(values.shape) - values).square().reshape(len(values), -1).mean(dim=1) / 2}


def _answer(found: Any) -> Tensor:
    """What the model gives, or the part of it that transformers' models call so."""
    found = getattr(found, "logits", found)
    if not isinstance(found, Tensor):
        raise DataError(f"The model gives a {type(found).__name__}, not a tensor. Write loss(model, …).")
    return found


def _number(told: Any, what: str) -> float:
    """A plain number, whatever it is a number of; TypeError for anything that holds more than one."""
    if not isinstance(told, Tensor | np.ndarray | np.generic | int | float):
        raise TypeError(f"{what} a {type(told).__name__}, not a number")
    if (shape := np.shape(told)) and math.prod(shape) != 1:
        raise TypeError(f"{what} {math.prod(shape):,} numbers, of shape {tuple(shape)}, not one")
    return float(told)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and name.isascii() and len(name) <= NAME_LETTERS
