"""Compute one client's part of a task.

Build the Client, call the algorithm, and separate what is sent from the client's state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from training.config.base import ConfigError, Problem
from training.data import Batch
from training.federated.client import Client, ClientFunctions, ClientInputs, ExtraLoss, ForwardPass
from training.federated.client_tasks import ClientTask
from training.federated.layout import Layout
from training.federated.model import PERSONAL, STATISTICS, Model
from training.federation.config import FederationConfig


class ClientComputation:
    """The computation of one client, which vmap may turn into that of many stacked ones."""

    def __init__(self, config: FederationConfig, model: Model, task: ClientTask, inputs: ClientInputs) -> None:
        self._config, self._model, self.task, self._inputs = config, model, task, inputs

    def __call__(
        self,
        state: dict[str, Tensor],
        number: Tensor,
        samples: Tensor,
        batch: Any,
        weights: Tensor | None,
        all_samples: Any,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Return what the client sends by name, its new state by name, and its mean loss.

        `number`: the client's number. `batch`: parts of shape (steps, width, …), or a list of the steps' batches.
        `weights` (steps, width): 1 for a sample, 0 for padding; None: no padding. `all_samples`: a batch and its
        weights.
        """
        model = self._model
        shared = model.weights.shared
        start = torch.cat([self._inputs.model, state.pop(PERSONAL)]) if PERSONAL in state else self._inputs.model
        statistics = state.pop(STATISTICS, self._inputs.statistics)

        def loss(w: Tensor, statistics: Tensor, step: int, extra_loss: ExtraLoss | None) -> tuple[Tensor, Tensor]:
            step_batch = batch[step] if weights is None else tuple(part[step] for part in batch)
            return self._loss(w, statistics, step_batch, None if weights is None else weights[step], extra_loss)

        def forward(w: Tensor, statistics: Tensor, step: int, shift: Tensor | None) -> ForwardPass:
            step_batch = batch[step] if weights is None else tuple(part[step] for part in batch)
            return self._forward(w, statistics, step_batch, None if weights is None else weights[step], shift)

        def whole_loss(w: Tensor) -> Tensor:
            samples_of_client, is_sample = all_samples
            return self._loss(w, statistics, samples_of_client, is_sample)[0]

        client = Client(
            self._inputs,
            model=start,
            statistics=statistics,
            samples=samples,
            state=state,
            number=number,
            functions=ClientFunctions(
                loss=loss,
                forward=forward,
                whole_loss=whole_loss if all_samples is not None else None,
                custom_train=None
                if model.task.descend is None
                else lambda w, statistics: self._custom_train(w, statistics, batch, int(number)),
            ),
        )
        sent = dict(self.task.compute(client))
        if model.task.descend is not None and self.task.is_training and (handling := client.step_handling):
            text = f'is "{self._config.algorithm}", which {handling}, but they have a train() of their own.'
            raise ConfigError([Problem("run.algorithm", f'{text} Write "fedavg", or no train().')])
        if self.task.is_training and not self._inputs.sgd.is_plain and not client.took_sgd_steps:
            raise _ignored_error(self._config, has_custom_train=model.task.descend is not None)
        if not self.task.is_training:
            return sent, {}, client.mean_loss
        if len(start) > shared:
            client.state[PERSONAL] = client.model[shared:] + sent["delta"][shared:]
            sent = {name: value[:shared] if value.shape == start.shape else value for name, value in sent.items()}
        if model.statistics.shared:
            sent[STATISTICS] = self._shared_statistics(client.statistics, samples)
        elif model.statistics.size:
            client.state[STATISTICS] = client.statistics
        return sent, client.state, client.mean_loss if self.task.takes_steps else sent["loss"]

    def _custom_train(
        self, w: Tensor, statistics: Tensor, batches: Sequence[Batch], client: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run train() of a client.py on a copy of the model. Return its weights, running statistics and mean loss.

        Only tensors that the server has declared are read back from the copy.
        """
        task, layouts = self._model.task, (self._model.weights, self._model.statistics)
        assert task.descend is not None
        module = copy.deepcopy(task.model)
        load_tensors(module, {**layouts[0].tensors(w), **layouts[1].tensors(statistics)})
        with torch.enable_grad(), _precision(self._config.dtype, self._model.device):
            reported_loss = task.descend(module, batches, self._inputs.sgd.learning_rate, client, self._inputs.round)
        after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        w, statistics = (layout.vector(_check_declared(layout, after, w.dtype)).to(w) for layout in layouts)
        if reported_loss is None:
            with torch.no_grad():
                loss = self._loss(w, statistics, batches[-1], None)[0] if batches else w.new_full((), torch.nan)
        else:
            loss = w.new_tensor(reported_loss)
        return w, statistics, loss

    def _shared_statistics(self, statistics: Tensor, samples: Tensor) -> Tensor:
        """Return the running statistics that are sent."""
        model = self._model
        if model.algorithm.share is None:
            return statistics
        return model.statistics.vector(
            model.algorithm.share(model.statistics.tensors(statistics), samples, **model.options)
        )

    def _forward(
        self, w: Tensor, statistics: Tensor, batch: Batch, is_sample: Tensor | None, shift: Tensor | None
    ) -> ForwardPass:
        task = self._model.task
        named_weights = self._model.weights.tensors(w)
        tensors = {**named_weights, **self._model.statistics.tensors(statistics.clone()), **_counters(task.model)}
        calls: list[tuple[Tensor, Tensor]] = []
        features: list[Tensor] = []

        def model(inputs: Tensor, *more: Tensor, **named: Any) -> Tensor:
            shifted = inputs if shift is None else inputs + shift
            outputs: Tensor = functional_call(task.model, tensors, (shifted, *more), named)
            calls.append((inputs, outputs))
            return outputs

        with _capture_features(task.model, task.head, features), _precision(self._config.dtype, self._model.device):
            task.loss(model, batch)
        ((inputs, outputs),) = calls
        labels = batch[-1]
        is_sample = torch.ones(len(labels), dtype=w.dtype, device=w.device) if is_sample is None else is_sample
        return ForwardPass(inputs, features[0].to(w.dtype), outputs.to(w.dtype), labels, is_sample, named_weights)

    def _loss(
        self, w: Tensor, statistics: Tensor, batch: Batch, weights: Tensor | None, extra_loss: ExtraLoss | None = None
    ) -> tuple[Tensor, Tensor]:
        task = self._model.task
        changed = statistics.clone() if self._model.statistics.size else statistics
        tensors = {**self._model.weights.tensors(w), **self._model.statistics.tensors(changed), **_counters(task.model)}

        def model(*inputs: Tensor, **named: Any) -> Tensor:
            outputs: Tensor = functional_call(task.model, tensors, inputs, named)
            return outputs

        features: list[Tensor] = []
        capture = nullcontext() if extra_loss is None else _capture_features(task.model, task.head, features)
        with capture, _precision(self._config.dtype, self._model.device):
            if weights is None or task.score_samples is None:
                loss = task.loss(model, batch)
            else:
                loss = (task.score_samples(model, batch)["loss"] * weights).sum() / weights.sum()
        if extra_loss is not None:
            more = extra_loss(features[0].to(w.dtype))
            loss = loss + (more.mean() if weights is None else (more * weights).sum() / weights.sum())
        if self._config.ridge:
            loss = loss + self._config.ridge / 2 * w.square().sum()
        return loss, changed


def _ignored_error(config: FederationConfig, *, has_custom_train: bool) -> ConfigError:
    """Return the error of a run whose clients' steps take no momentum or weight decay, though it asks for them."""
    field = "client_momentum" if config.client_momentum else "client_weight_decay"
    why = (
        "clients have a train() of their own"
        if has_custom_train
        else f"{config.algorithm} never calls client.descend()"
    )
    text = f"is {getattr(config, field):g}, but {why}, which would ignore it. Write 0, and apply it there."
    return ConfigError([Problem(f"run.{field}", text)])


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the module's parameters and buffers of the same names."""
    targets = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, value in tensors.items():
            targets[name].copy_(value)


def _check_declared(layout: Layout, found: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Return `found`; ValueError if a tensor that the server expects is missing, or has another shape or dtype."""
    for name, shape in layout.shapes.items():
        if name not in found:
            raise ValueError(f"train() took {name} out of the model, which the server expects")
        if (value := found[name]).shape != shape or value.dtype != dtype:
            is_, was = f"{value.dtype} {tuple(value.shape)}", f"{dtype} {tuple(shape)}"
            raise ValueError(f"train() left {name} as {is_}, but the server expects {was}")
    return found


def _counters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the integer buffers: a forward pass counts in them, and must not change those of all clients.

    Under torch.func it must not change tensors from outside at all. Nothing that we run reads them.
    """
    return {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_floating_point()}


@contextmanager
def _capture_features(model: nn.Module, head: str, features: list[Tensor]) -> Iterator[None]:
    """Append the head's input (samples, features) of each call to `features`."""

    def take(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        features.append(inputs[0].flatten(1))

    hook = model.get_submodule(head).register_forward_pre_hook(take)
    try:
        yield
    finally:
        hook.remove()


def _precision(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bf16" else nullcontext()
