"""One client's work on a question: what an algorithm's functions are given, and what comes of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from training.config.asked import ConfigError, Problem
from training.data import Batch
from training.federated.client import Beside, Client, Look, Sgd
from training.federated.client_tasks import Question
from training.federated.layout import Layout
from training.federated.model import PERSONAL, STATISTICS, Model
from training.federation.config import FederationConfig


class One:
    """One client's work, for vmap to make many of, or for itself."""

    def __init__(
        self,
        config: FederationConfig,
        model: Model,
        question: Question,
        start: Tensor,
        statistics: Tensor,
        server: Mapping[str, Tensor],
        steps: int,
        sgd: Sgd,
        round_: int,
    ) -> None:
        self._config, self._model, self.question = config, model, question
        self._start, self._statistics, self._server = start, statistics, server
        self._steps, self._sgd, self._round = steps, sgd, round_

    def __call__(
        self,
        kept: dict[str, Tensor],
        who: Tensor,
        samples: Tensor,
        batch: Any,
        weights: Tensor | None,
        everything: Any,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """`who`: the client's number; `batch`: (steps, width, …) each, or a list of the steps' batches; `weights`
        (steps, width): 1 where a place holds a sample; None: all do."""
        model = self._model
        shared = model.weights.shared
        start = torch.cat([self._start, kept.pop(PERSONAL)]) if PERSONAL in kept else self._start
        statistics = kept.pop(STATISTICS, self._statistics)

        def losses(w: Tensor, statistics: Tensor, step: int, beside: Beside | None) -> tuple[Tensor, Tensor]:
            mine = batch[step] if weights is None else tuple(part[step] for part in batch)
            return self._loss(w, statistics, mine, None if weights is None else weights[step], beside)

        def looks(w: Tensor, statistics: Tensor, step: int, shift: Tensor | None) -> Look:
            mine = batch[step] if weights is None else tuple(part[step] for part in batch)
            return self._look(w, statistics, mine, None if weights is None else weights[step], shift)

        def whole(w: Tensor) -> Tensor:
            mine, there = everything
            return self._loss(w, statistics, mine, there)[0]

        client = Client(
            start,
            statistics=statistics,
            losses=losses,
            steps=self._steps,
            sgd=self._sgd,
            samples=samples,
            server=self._server,
            kept=kept,
            everything=whole if everything is not None else None,
            number=who,
            looks=looks,
            own=None
            if model.task.descend is None
            else lambda w, statistics: self._descended(w, statistics, batch, int(who)),
        )
        sent = dict(self.question.answer(client))
        if model.task.descend is not None and self.question.trains and (control := client.control):
            text = f'is "{self._config.algorithm}", which {control}, but they have a train() of their own.'
            raise ConfigError([Problem("run.algorithm", f'{text} Write "fedavg", or no train().')])
        if self.question.trains and not self._sgd.is_plain and not client.took_sgd_steps:
            raise _ignored(self._config, own_train=model.task.descend is not None)
        if not self.question.trains:
            return sent, {}, client.seen
        if len(start) > shared:
            client.kept[PERSONAL] = client.model[shared:] + sent["delta"][shared:]
            sent = {name: value[:shared] if value.shape == start.shape else value for name, value in sent.items()}
        if model.statistics.shared:
            sent[STATISTICS] = self._shared(client.statistics, samples)
        elif model.statistics.size:
            client.kept[STATISTICS] = client.statistics
        return sent, client.kept, client.seen if self.question.takes_steps else sent["loss"]

    def _descended(
        self, w: Tensor, statistics: Tensor, batches: Sequence[Batch], client: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Where a way of its own leads: the weights, the running statistics, and the mean loss. Nothing else of what it
        does to the model is looked at."""
        task, layouts = self._model.task, (self._model.weights, self._model.statistics)
        assert task.descend is not None
        module = copy.deepcopy(task.model)
        fill(module, {**layouts[0].tensors(w), **layouts[1].tensors(statistics)})
        with torch.enable_grad(), _precision(self._config.dtype, self._model.device):
            told = task.descend(module, batches, self._sgd.learning_rate, client, self._round)
        after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        w, statistics = (layout.vector(_declared(layout, after, w.dtype)).to(w) for layout in layouts)
        if told is None:
            with torch.no_grad():
                loss = self._loss(w, statistics, batches[-1], None)[0] if batches else w.new_full((), torch.nan)
        else:
            loss = w.new_tensor(told)
        return w, statistics, loss

    def _shared(self, statistics: Tensor, samples: Tensor) -> Tensor:
        """What is sent of the running statistics."""
        model = self._model
        if model.algorithm.share is None:
            return statistics
        return model.statistics.vector(
            model.algorithm.share(model.statistics.tensors(statistics), samples, **model.options)
        )

    def _look(self, w: Tensor, statistics: Tensor, batch: Batch, there: Tensor | None, shift: Tensor | None) -> Look:
        task = self._model.task
        own = self._model.weights.tensors(w)
        tensors = {**own, **self._model.statistics.tensors(statistics.clone()), **_counters(task.model)}
        called: list[tuple[Tensor, Tensor]] = []
        entered: list[Tensor] = []

        def model(inputs: Tensor, *more: Tensor, **named: Any) -> Tensor:
            shifted = inputs if shift is None else inputs + shift
            answer: Tensor = functional_call(task.model, tensors, (shifted, *more), named)
            called.append((inputs, answer))
            return answer

        with _entering(task.model, task.head, entered), _precision(self._config.dtype, self._model.device):
            task.loss(model, batch)
        ((inputs, answer),) = called
        labels = batch[-1]
        there = torch.ones(len(labels), dtype=w.dtype, device=w.device) if there is None else there
        return Look(inputs, entered[0].to(w.dtype), answer.to(w.dtype), labels, there, own)

    def _loss(
        self, w: Tensor, statistics: Tensor, batch: Batch, weights: Tensor | None, beside: Beside | None = None
    ) -> tuple[Tensor, Tensor]:
        task = self._model.task
        changed = statistics.clone() if self._model.statistics.size else statistics
        tensors = {**self._model.weights.tensors(w), **self._model.statistics.tensors(changed), **_counters(task.model)}

        def model(*inputs: Tensor, **named: Any) -> Tensor:
            answer: Tensor = functional_call(task.model, tensors, inputs, named)
            return answer

        entered: list[Tensor] = []
        watched = nullcontext() if beside is None else _entering(task.model, task.head, entered)
        with watched, _precision(self._config.dtype, self._model.device):
            if weights is None or task.each is None:
                loss = task.loss(model, batch)
            else:
                loss = (task.each(model, batch)["loss"] * weights).sum() / weights.sum()
        if beside is not None:
            more = beside(entered[0].to(w.dtype))
            loss = loss + (more.mean() if weights is None else (more * weights).sum() / weights.sum())
        if self._config.ridge:
            loss = loss + self._config.ridge / 2 * w.square().sum()
        return loss, changed


def _ignored(config: FederationConfig, *, own_train: bool) -> ConfigError:
    """Return the error of a run whose clients' steps take no momentum or weight decay, though it asks for them."""
    field = "client_momentum" if config.client_momentum else "client_weight_decay"
    why = "clients have a train() of their own" if own_train else f"{config.algorithm} never calls client.descend()"
    text = f"is {getattr(config, field):g}, but {why}, which would ignore it. Write 0, and apply it there."
    return ConfigError([Problem(f"run.{field}", text)])


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Puts them into the module's own, by name."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)


def _declared(layout: Layout, found: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Of what a model has, that which may leave a client; ValueError where it is not what it was."""
    for name, shape in layout.shapes.items():
        if name not in found:
            raise ValueError(f"train() took {name} out of the model, which the server expects")
        if (value := found[name]).shape != shape or value.dtype != dtype:
            is_, was = f"{value.dtype} {tuple(value.shape)}", f"{dtype} {tuple(shape)}"
            raise ValueError(f"train() left {name} as {is_}, but the server expects {was}")
    return found


def _counters(model: nn.Module) -> dict[str, Tensor]:
    """Whole numbers that a model counts in, as copies: what it is called with must not be changed for all clients."""
    return {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_floating_point()}


@contextmanager
def _entering(model: nn.Module, head: str, entered: list[Tensor]) -> Iterator[None]:
    """Notes what enters the head, call by call: (samples, features)."""

    def take(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        entered.append(inputs[0].flatten(1))

    hook = model.get_submodule(head).register_forward_pre_hook(take)
    try:
        yield
    finally:
        hook.remove()


def _precision(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bf16" else nullcontext()
