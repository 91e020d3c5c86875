"""What clients do in a round: a chunk of them computed together by vmap, or one after the other.

Which of the two is settled by rule, never by timing: their last bits differ, and a run that is resumed, or goes on with
fewer ranks, must come to the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _NormBase

from training.config.choices import Value
from training.contracts import Algorithm
from training.data import Batch, Split, Task
from training.federated import attention, failing
from training.federated.client import Beside, Client, Look
from training.federated.filtering import Chain
from training.federated.layout import Layout
from training.federated.messages import Description, Messages
from training.federated.plainly import differentiate_plainly
from training.federated.schedule import Chunk, Ids, batches, steps_of, widths_of
from training.federation.config import FederationConfig
from training.federation.splitting import Divided
from training.runtime.seeds import derive_seed

if TYPE_CHECKING:
    from training.federated.server import Server

STATISTICS = "statistics"
"""What is sent beside the algorithm's own: running means and variances, where the model has any."""
PERSONAL = "personal"
"""What is kept beside the algorithm's own: the part of the model that never travels."""
DROPPED, SHUFFLED = 3, 2
"""Of what is derived from a run's seed: dropout, and the order of samples."""
TRIED = 5
"""Clients that may fail before the first round, until it is taken for the program's fault."""
SAMPLES, CLIENTS = "samples", "clients"
"""What sums are weighted by."""


class ClientsFailed(RuntimeError):
    """No client could do its work; the traceback of the first says why."""

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(f"{message}:\n{traceback}")


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
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    """What is not trained, but lies in checkpoints, too."""

    @cached_property
    def numbers(self) -> int:
        """Of all parameters, those that are not trained with them."""
        return sum(parameter.numel() for parameter in self.task.model.parameters())


@dataclass
class Sent:
    """What a chunk's clients have sent, in the order of its clients; and what they keep."""

    clients: Ids
    values: dict[str, Tensor]
    """(clients, …) by name, as the server has them."""
    kept: dict[str, Tensor]
    """(clients, …) by name."""
    losses: Tensor
    """(clients,): mean over the batches that each has trained on."""
    has_losses: bool = True
    failed: dict[int, str] = field(default_factory=dict)
    """Client → its traceback. It is among `clients`, and what stands for it counts for nothing."""
    wire: dict[str, Tensor] = field(default_factory=dict)
    """(clients, …) by name: what a message of each holds, from which the server has `values`."""


@dataclass(frozen=True)
class Question:
    """What clients are asked, and what comes back."""

    name: str
    answer: Callable[..., Mapping[str, Tensor]]
    """(client): what one client sends, by the names in `sent`."""
    sent: Mapping[str, str]
    """By what each is weighted: "samples" or "clients"."""
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    """What is sent beside the model."""
    fold: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """(what one client sent): what of it is added up."""
    is_whole: bool = False
    """Whether clients look at everything that they have."""
    takes_steps: bool = True
    """Whether they go through it in batches."""
    model: Tensor | None = None
    """The shared part that clients start from; None: the server's."""
    trains: bool = False
    """Clients keep what they have come to."""

    def weighted_by(self, name: str) -> str:
        return SAMPLES if name == STATISTICS else self.sent[name]

    def folded(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """(clients, numbers) by name: of what they have sent, what is added up."""
        found = vmap(self.fold)(dict(values)) if self.fold is not None and values else values
        return {name: value.reshape(len(value), -1) for name, value in found.items()}


class Work:
    """Runs chunks of clients."""

    def __init__(
        self,
        config: FederationConfig,
        model: Model,
        divided: Divided,
        filters: Chain,
        *,
        alone: str,
        split: Split = "train",
    ) -> None:
        """`alone`: why clients are computed one by one; "": they are stacked. `split`: where their samples are."""
        differentiate_plainly()
        self._config, self._model, self._divided, self._split = config, model, divided, split
        self._filters, self.alone = filters, alone
        self._sizes: dict[str, tuple[dict[str, int], Messages]] = {}
        algorithm = model.algorithm
        self.training = Question(
            "train",
            lambda client: algorithm.train(client, **model.options),
            algorithm.SENT,
            fold=algorithm.fold,
            is_whole=algorithm.WHOLE,
            takes_steps=algorithm.STEPS,
            trains=True,
        )

    @property
    def batch(self) -> int:
        return self._config.batch

    @property
    def seed(self) -> int:
        return self._config.seed

    def full_steps(self, clients: Ids) -> Ids:
        """Of a whole round of these clients."""
        config = self._config
        sizes = self._divided.sizes[clients]
        return steps_of(sizes, config.batch, epochs=config.epochs, local_steps=config.local_steps)

    @property
    def numbers(self) -> int:
        """Of the weights, also of those that are not trained: what passes through them takes memory for each client."""
        return self._model.numbers

    def samples_of(self, clients: Ids) -> NDArray[np.int64]:
        """That these clients train on."""
        return self._divided.sizes[clients]

    def sizes_of(self, question: Question, server: Server) -> dict[str, int]:
        """How many numbers of each name are added up."""
        return self._tried(question, server)[0]

    def messages_of(self, question: Question, server: Server) -> Messages:
        """What a question to one client holds, and its answer."""
        return self._tried(question, server)[1]

    def try_out(self, server: Server) -> None:
        """One client's work, thrown away: whether stacking works at all, and what a client sends."""
        self._tried(self.training, server)

    def _tried(self, question: Question, server: Server) -> tuple[dict[str, int], Messages]:
        """What one client's answer is made of: known once it has been asked, by way of trial."""
        if question.name not in self._sizes:
            sent = self._trial(question, server)
            sizes = {name: value.shape[1] for name, value in question.folded(sent.values).items()}
            self._sizes[question.name] = sizes, self._described(question, server, sent)
        return self._sizes[question.name]

    def _trial(self, question: Question, server: Server) -> Sent:
        """The first answer, of those that have least to do: a client that can't work may be alone in that."""
        failed: dict[int, str] = {}
        for client in np.argsort(self._divided.sizes, kind="stable")[:TRIED]:
            mine = np.array([client])
            chunk = Chunk(mine, 1, int(widths_of(self._divided.sizes[mine], self.batch)[0]))
            sent = self._try(chunk, question, server)
            if not sent.failed:
                return sent
            failed |= sent.failed
        first, text = next(iter(failed.items()))
        raise ClientsFailed(f"all {len(failed)} clients that were tried out failed, client {first} so", text)

    def _try(self, chunk: Chunk, question: Question, server: Server) -> Sent:
        """One client's work; where stacking is at fault, and not the client, all are computed one by one from now."""
        if self.alone or not question.trains:
            return self.run(chunk, 0, question, server)
        try:
            return self.run(chunk, 0, question, server, strict=True)
        except Exception as error:
            self.alone = f"torch can't stack it: {' '.join(str(error).split())[:200]}"
        sent = self.run(chunk, 0, question, server)
        if sent.failed:
            self.alone = ""
        return sent

    def _described(self, question: Question, server: Server, sent: Sent) -> Messages:
        model = self._model
        shapes = {**model.weights.travelling, **model.statistics.travelling} if question.trains else {}
        down = {name: (tuple(shape), model.dtype) for name, shape in shapes.items()}
        beside = self._broadcast(question, server)
        down |= {f"server.{name}": (tuple(value.shape), value.dtype) for name, value in beside.items()}
        return Messages(
            up=Description.of({name: value[0] for name, value in sent.wire.items()}), down=Description(down)
        )

    def _broadcast(self, question: Question, server: Server) -> dict[str, Tensor]:
        memory = {name: server.memory[name] for name in self._model.algorithm.BROADCAST} if question.trains else {}
        return {name: value.to(self._model.dtype) for name, value in {**memory, **question.vectors}.items()}

    def run(self, chunk: Chunk, round_: int, question: Question, server: Server, *, strict: bool = False) -> Sent:
        """What these clients answer. `strict`: what goes wrong with all of them together is raised."""
        rows = torch.from_numpy(chunk.clients).to(self._model.device)
        own = {name: values[rows] for name, values in server.kept.items()}
        filters = {name: own.pop(name) for name in self._filters.keeps}
        sent = self._answered(chunk, round_, question, server, own, strict=strict)
        sent.wire = dict(sent.values)
        return self._filters.passed(sent, round_, filters) if question.trains else sent

    def _answered(
        self, chunk: Chunk, round_: int, question: Question, server: Server, own: Mapping[str, Tensor], *, strict: bool
    ) -> Sent:
        _seed(derive_seed(self._config.seed, DROPPED, round_, int(chunk.clients[0])), self._model.device)
        ids, there = self._batches(chunk, round_) if question.takes_steps else _no_batches(chunk)
        one = _One(
            self._config,
            self._model,
            question,
            server.shared if question.model is None else question.model.to(self._model.dtype),
            server.statistics,
            self._broadcast(question, server),
            chunk.steps,
        )
        counts = torch.from_numpy(self._divided.sizes[chunk.clients]).to(self._model.device, self._model.dtype)
        if not self.alone:
            try:
                return self._together(one, chunk, ids, there, own, counts)
            except Exception:
                if strict:
                    raise
            # It is some client's: which, only one by one can tell.
        return self._one_by_one(one, chunk, ids, there, own, counts)

    def _batches(self, chunk: Chunk, round_: int) -> tuple[Ids, NDArray[np.bool_]]:
        owned = [self._divided.train[client] for client in chunk.clients]
        seed = derive_seed(self._config.seed, SHUFFLED)
        return batches(chunk, owned, self._config.batch, seed=seed, round_=round_)

    def _together(
        self, one: _One, chunk: Chunk, ids: Ids, there: Any, own: Mapping[str, Tensor], counts: Tensor
    ) -> Sent:
        batch = self._look_up(ids.reshape(-1), ids.shape)
        weights = torch.from_numpy(there).to(self._model.device, self._model.dtype)
        everything = self._everything(chunk) if one.question.is_whole else None
        who = torch.from_numpy(chunk.clients).to(self._model.device)
        dims = (0, 0, 0, 0, 0, None if everything is None else 0)
        stacked = vmap(one, in_dims=dims, randomness="different")
        with attention.as_products():
            values, kept, losses = stacked(dict(own), who, counts, batch, weights, everything)
        return Sent(chunk.clients, values, kept, losses, has_losses=one.question.trains)

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
                if one.question.is_whole:
                    whole = (self._look_up(self._divided.train[client], (-1,)), None)
                who = torch.tensor(client, device=self._model.device)
                done.append(one(mine, who, counts[place], parts, None, whole))
            except Exception as error:
                failed[client] = failing.traceback_of(error)
                done.append(None)
        return _gathered(chunk, done, failed, own, has_losses=one.question.trains)

    def _look_up(self, ids: Ids, shape: Sequence[int]) -> Batch:
        """The samples, as (*shape, …)."""
        device, dtype = self._model.device, self._model.dtype
        found = self._model.task.batch(self._split, ids)
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
        question: Question,
        start: Tensor,
        statistics: Tensor,
        server: Mapping[str, Tensor],
        steps: int,
    ) -> None:
        self._config, self._model, self.question = config, model, question
        self._start, self._statistics, self._server = start, statistics, server
        self._steps = steps

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
            learning_rate=self._config.learning_rate,
            samples=samples,
            server=self._server,
            kept=kept,
            everything=whole if everything is not None else None,
            number=who,
            looks=looks,
        )
        sent = dict(self.question.answer(client))
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

        def model(inputs: Tensor, *more: Tensor) -> Tensor:
            answer: Tensor = functional_call(task.model, tensors, (inputs if shift is None else inputs + shift, *more))
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


def _counters(model: nn.Module) -> dict[str, Tensor]:
    """Whole numbers that a model counts in, as copies: what it is called with must not be changed for all clients."""
    return {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_floating_point()}


def _seed(seed: int, device: torch.device) -> None:
    """What torch draws from on this device. manual_seed takes a millisecond on a CPU, to note it for absent devices."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _no_batches(chunk: Chunk) -> tuple[Ids, NDArray[np.bool_]]:
    nothing = np.zeros((len(chunk.clients), 0, 1), dtype=np.int64)
    return nothing, nothing.astype(bool)


def _gathered(
    chunk: Chunk, done: Sequence[Any], failed: dict[int, str], own: Mapping[str, Tensor], *, has_losses: bool
) -> Sent:
    """As many rows as clients; where one failed, nothing in place of what it would have sent."""
    whole = next((found for found in done if found is not None), None)
    if whole is None:
        return Sent(chunk.clients, {}, dict(own), torch.full((len(done),), torch.nan), has_losses, failed)
    nothing = {name: torch.zeros_like(value) for name, value in whole[0].items()}
    values = [nothing if found is None else found[0] for found in done]
    kept = [{name: own[name][i] for name in whole[1]} if found is None else found[1] for i, found in enumerate(done)]
    losses = [whole[2].new_full((), torch.nan) if found is None else found[2].detach() for found in done]
    return Sent(
        chunk.clients,
        {name: torch.stack([value[name].detach() for value in values]) for name in nothing},
        {name: torch.stack([value[name].detach() for value in kept]) for name in whole[1]},
        torch.stack(losses),
        has_losses,
        failed,
    )


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
