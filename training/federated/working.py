"""What clients do in a round: a chunk of them computed together by vmap, or one after the other.

Which of the two is settled by rule, never by timing: their last bits differ, and a run that is resumed, or goes on with
fewer ranks, must come to the same model.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _NormBase

from training.config.choices import Value
from training.contracts import Algorithm
from training.data import Batch, Task
from training.federated.client import Beside, Client
from training.federated.layout import Layout, counters
from training.federated.messages import Sizes
from training.federated.messages import size as message_size
from training.federated.schedule import Chunk, Ids, batches, widths_of
from training.federation.config import FederationConfig
from training.federation.splitting import Divided
from training.runtime.seeds import derive_seed

if TYPE_CHECKING:
    from training.federated.server import Server

STACKED_PARAMETERS = 100_000
"""Models of more are computed one by one: at 85,000 stacking was twice as fast on a CPU, at 814,000 it lost."""
STATISTICS = "statistics"
"""What is sent beside the algorithm's own: running means and variances, where the model has any."""
PERSONAL = "personal"
"""What is kept beside the algorithm's own: the part of the model that never travels."""
DROPPED, SHUFFLED = 3, 2
"""Of what is derived from a run's seed: dropout, and the order of samples."""
TRACEBACK_LETTERS = 4000


@dataclass(frozen=True)
class Model:
    """What is trained, and where its numbers lie."""

    task: Task
    weights: Layout
    statistics: Layout
    algorithm: Algorithm
    options: Mapping[str, Value]
    """The algorithm's."""
    device: torch.device
    dtype: torch.dtype
    """Of the weights."""


@dataclass
class Sent:
    """What a chunk's clients have sent, in the order of its clients; and what they keep."""

    clients: Ids
    values: dict[str, Tensor]
    """(clients, numbers) by name."""
    kept: dict[str, Tensor]
    """(clients, …) by name."""
    losses: Tensor
    """(clients,): mean over the batches that each has trained on."""
    failed: dict[int, str] = field(default_factory=dict)
    """Client → its traceback. It is among `clients`, and what stands for it counts for nothing."""


class Work:
    """Runs chunks of clients."""

    def __init__(self, config: FederationConfig, model: Model, divided: Divided, *, alone: str) -> None:
        """`alone`: why clients are computed one by one; "": they are stacked."""
        self._config, self._model, self._divided = config, model, divided
        self.alone = alone
        self._samples = torch.from_numpy(divided.sizes).to(model.dtype)

    def try_out(self, server: Server) -> None:
        """One client's work, thrown away: whether stacking works at all, and what a client sends."""
        client = int(np.argmin(self._divided.sizes))
        samples = self._divided.sizes[[client]]
        width = int(widths_of(samples, self._config.batch)[0])
        chunk = Chunk(np.array([client]), 1, width)
        arguments = (chunk, 0, server.shared, server.statistics, server.broadcast, server.kept)
        if not self.alone:
            try:
                sent = self.run(*arguments, strict=True)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                self.alone = f"torch can't stack it: {' '.join(str(error).split())[:200]}"
        if self.alone:
            sent = self.run(*arguments)
            if sent.failed:
                raise RuntimeError(f"client {client} fails at its first step:\n{sent.failed[client]}")
        self.sizes = {name: value.shape[1] for name, value in sent.values.items()}
        self.messages = self._measured(server)

    def _measured(self, server: Server) -> Sizes:
        """What a message of either kind takes, rounds and clients with as many digits as they may have."""
        config, model = self._config, self._model
        dtype = str(model.dtype).removeprefix("torch.")
        shared = [(name, shape, dtype) for name, shape in model.weights.travelling.items()]
        shared += [(name, shape, dtype) for name, shape in model.statistics.travelling.items()]
        more = [(name, value.shape, dtype) for name, value in server.broadcast.items()]
        up = [(name, (size,), dtype) for name, size in self.sizes.items()]
        most = {"round_": config.rounds, "samples": int(self._divided.sizes.max())}
        return Sizes(
            up=message_size(up, client=config.clients - 1, **most),
            down=message_size(shared + more, client=None, round_=config.rounds, samples=None),
        )

    def run(
        self,
        chunk: Chunk,
        round_: int,
        start: Tensor,
        statistics: Tensor,
        server: Mapping[str, Tensor],
        kept: Mapping[str, Tensor],
        *,
        strict: bool = False,
    ) -> Sent:
        """What these clients send after their steps from `start`, the shared part of the model.

        `statistics`: running ones; `server`: what else it has sent; `kept`: (all clients, …) by name.
        `strict`: what goes wrong with all of them together is raised.
        """
        torch.manual_seed(derive_seed(self._config.seed, DROPPED, round_, int(chunk.clients[0])))
        owned = [self._divided.train[client] for client in chunk.clients]
        ids, there = batches(
            chunk, owned, self._config.batch, seed=derive_seed(self._config.seed, SHUFFLED), round_=round_
        )
        rows = torch.from_numpy(chunk.clients)
        own = {name: values[rows.to(values.device)] for name, values in kept.items()}
        counts = self._samples[rows].to(self._model.device)
        one = _One(self._config, self._model, start, statistics, server, chunk.steps, is_alone=bool(self.alone))
        if self.alone:
            return self._one_by_one(one, chunk, ids, there, own, counts)
        try:
            return self._together(one, chunk, ids, there, own, counts)
        except (RuntimeError, ValueError, TypeError, IndexError):
            if strict:
                raise
            # Some client's: which, only one by one can tell.
            one.is_alone = True
            return self._one_by_one(one, chunk, ids, there, own, counts)

    def _together(
        self, one: _One, chunk: Chunk, ids: Ids, there: Any, own: Mapping[str, Tensor], counts: Tensor
    ) -> Sent:
        batch = self._look_up(ids.reshape(-1), ids.shape)
        weights = torch.from_numpy(there).to(self._model.device, self._model.dtype)
        everything = self._everything(chunk) if self._model.algorithm.WHOLE else None
        dims = (0, 0, 0, 0, None if everything is None else 0)
        stacked = vmap(one, in_dims=dims, randomness="different")
        values, kept, losses = stacked(dict(own), counts, batch, weights, everything)
        return Sent(chunk.clients, values, kept, losses)

    def _one_by_one(
        self, one: _One, chunk: Chunk, ids: Ids, there: Any, own: Mapping[str, Tensor], counts: Tensor
    ) -> Sent:
        done: list[Any] = []
        failed: dict[int, str] = {}
        for place, client in enumerate(chunk.clients.tolist()):
            mine = {name: values[place] for name, values in own.items()}
            try:
                parts = [self._look_up(step[held], (-1,)) for step, held in zip(ids[place], there[place], strict=True)]
                whole = None
                if self._model.algorithm.WHOLE:
                    whole = (self._look_up(self._divided.train[client], (-1,)), None)
                done.append(one(mine, counts[place], parts, None, whole))
            except Exception:
                failed[client] = traceback.format_exc()[-TRACEBACK_LETTERS:]
                done.append(None)
        return _gathered(chunk, done, failed, own)

    def _look_up(self, ids: Ids, shape: Sequence[int]) -> Batch:
        """The samples, as (*shape, …)."""
        device, dtype = self._model.device, self._model.dtype
        found = self._model.task.batch("train", ids)
        placed = (part.to(device, dtype if part.is_floating_point() else None) for part in found)
        return tuple(part.reshape(*shape, *part.shape[1:]) for part in placed)

    def _everything(self, chunk: Chunk) -> tuple[Batch, Tensor]:
        """All samples of each client, and which places hold one."""
        owned = [self._divided.train[client] for client in chunk.clients]
        most = max(map(len, owned))
        ids = torch.zeros(len(owned), most, dtype=torch.int64)
        weights = torch.zeros(len(owned), most, dtype=self._model.dtype)
        for row, weight, mine in zip(ids, weights, owned, strict=True):
            row[: len(mine)] = torch.from_numpy(mine)
            weight[: len(mine)] = 1
        return self._look_up(ids.numpy().reshape(-1), ids.shape), weights.to(self._model.device)


class _One:
    """One client's work, for vmap to make many of, or for itself."""

    def __init__(
        self,
        config: FederationConfig,
        model: Model,
        start: Tensor,
        statistics: Tensor,
        server: Mapping[str, Tensor],
        steps: int,
        *,
        is_alone: bool,
    ) -> None:
        self._config, self._model = config, model
        self._start, self._statistics, self._server = start, statistics, server
        self._steps = steps
        self._counters = counters(model.task.model)
        self.is_alone = is_alone

    def __call__(
        self, kept: dict[str, Tensor], samples: Tensor, batch: Any, weights: Tensor | None, everything: Any
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """`batch`: (steps, width, …) each, or a list of the steps' batches; `weights` (steps, width): 1 where a place
        holds a sample; None: all do."""
        model, algorithm = self._model, self._model.algorithm
        shared = model.weights.shared
        start = torch.cat([self._start, kept.pop(PERSONAL)]) if PERSONAL in kept else self._start
        statistics = kept.pop(STATISTICS, self._statistics)

        def losses(w: Tensor, statistics: Tensor, step: int, beside: Beside | None) -> tuple[Tensor, Tensor]:
            mine = batch[step] if weights is None else tuple(part[step] for part in batch)
            return self._loss(w, statistics, mine, None if weights is None else weights[step], beside)

        def whole(w: Tensor) -> Tensor:
            mine, there = everything
            return self._loss(w, statistics, mine, there)[0]

        client = Client(
            start,
            statistics=statistics,
            losses=losses,
            steps=self._steps,
            learning_rate=self._config.learning_rate,
            samples=samples,
            server=self._server,
            kept=kept,
            everything=whole if everything is not None else None,
        )
        sent = dict(algorithm.train(client, **model.options))
        if len(start) > shared:
            client.kept[PERSONAL] = client.model[shared:] + sent["delta"][shared:]
            sent = {name: value[:shared] if value.shape == start.shape else value for name, value in sent.items()}
        if model.statistics.size:
            place = sent if model.statistics.shared else client.kept
            place[STATISTICS] = client.statistics
        return {name: value.reshape(-1) for name, value in sent.items()}, client.kept, client.seen

    def _loss(
        self, w: Tensor, statistics: Tensor, batch: Batch, weights: Tensor | None, beside: Beside | None = None
    ) -> tuple[Tensor, Tensor]:
        task = self._model.task
        changed = statistics.clone() if self._model.statistics.size else statistics
        tensors = {**self._model.weights.tensors(w), **self._model.statistics.tensors(changed)}
        tensors |= {name: count.clone() for name, count in self._counters.items()}

        def model(*inputs: Tensor) -> Tensor:
            answer: Tensor = functional_call(task.model, tensors, inputs)
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


def _gathered(chunk: Chunk, done: Sequence[Any], failed: dict[int, str], own: Mapping[str, Tensor]) -> Sent:
    """As many rows as clients; where one failed, nothing in place of what it would have sent, and it keeps its own."""
    whole = next((found for found in done if found is not None), None)
    if whole is None:
        return Sent(chunk.clients, {}, dict(own), torch.full((len(done),), torch.nan), failed)
    nothing = {name: torch.zeros_like(value) for name, value in whole[0].items()}
    values = [nothing if found is None else found[0] for found in done]
    kept = [{name: own[name][i] for name in whole[1]} if found is None else found[1] for i, found in enumerate(done)]
    losses = [whole[2].new_full((), torch.nan) if found is None else found[2].detach() for found in done]
    return Sent(
        chunk.clients,
        {name: torch.stack([value[name].detach() for value in values]) for name in nothing},
        {name: torch.stack([value[name].detach() for value in kept]) for name in whole[1]},
        torch.stack(losses),
        failed,
    )


def why_alone(config: FederationConfig, model: Model) -> str:
    """Why a model's clients can't be stacked, as far as that is known without trying; "": they can."""
    task = model.task
    if task.each is None:
        return f"{config.recipe} knows no loss of a single sample, by which places without one are left out"
    if (numbers := model.weights.size) > STACKED_PARAMETERS:
        return f"it trains {numbers:,} parameters, more than {STACKED_PARAMETERS:,}"
    if any(isinstance(module, _NormBase) and module.training for module in task.model.modules()):
        return "it normalises over whole batches, which places without a sample would change"
    return ""


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


def normalises(model: nn.Module) -> list[str]:
    """The tensors of its layers that normalise over a batch, running ones with them."""
    return [
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        if isinstance(module, _NormBase)
        for own in dict([*module.named_parameters(), *module.named_buffers()])
    ]
