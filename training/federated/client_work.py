"""What clients do in a round: a chunk of them computed together by vmap, or one after the other.

Which of the two is settled by rule, never by timing: their last bits differ, and a run that is resumed, or goes on with
fewer ranks, must come to the same model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from training.config.asked import ConfigError
from training.corpus.errors import DataError
from training.data import Batch, Split
from training.federated import attention, client_failures
from training.federated.attack_simulation import Attacking
from training.federated.client import Sgd
from training.federated.client_computation import One
from training.federated.client_failures import ClientsFailed
from training.federated.client_tasks import Question, Sent
from training.federated.filter_chain import Chain
from training.federated.messages import Description, Messages
from training.federated.model import Model
from training.federated.plainly import differentiate_plainly
from training.federated.schedule import Chunk, Ids, batches, widths_of
from training.federation import parts, random_streams
from training.federation.config import FederationConfig
from training.federation.data_division import Divided
from training.federation.round_plan import steps_of
from training.runtime.seeds import derive_seed

if TYPE_CHECKING:
    from training.federated.server import Server

LEAST_FACTOR = 1e-12
"""The learning rate never falls below this part of the run's: some algorithms divide by it."""
TRIED = 5
"""Clients that may fail before the first round, until it is taken for the program's fault."""


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
        self.attacking = Attacking(config)
        self._sizes: dict[str, tuple[dict[str, int], Messages]] = {}
        algorithm = model.algorithm
        self.training = Question(
            "train",
            lambda client: algorithm.train(client, **model.options),
            algorithm.sent(model.options),
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
        begun = server.kept.initial_rows(len(chunk.clients))  # any client's will do, and each rank has these
        if self.alone or not question.trains:
            return self.run(chunk, 0, question, server, own=begun)
        try:
            return self.run(chunk, 0, question, server, own=begun, strict=True)
        except Exception as error:
            self.alone = f"torch can't stack it: {' '.join(str(error).split())[:200]}"
        sent = self.run(chunk, 0, question, server, own=begun)
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

    def run(
        self,
        chunk: Chunk,
        round_: int,
        question: Question,
        server: Server,
        *,
        own: dict[str, Tensor] | None = None,
        strict: bool = False,
    ) -> Sent:
        """What these clients answer. `own`: what they keep, (clients, …) by name, where it is not what they have been
        borrowed for; `strict`: what goes wrong with all of them together is raised."""
        own = server.kept.rows_of(chunk.clients) if own is None else dict(own)
        filters = {name: own.pop(name) for name in self._filters.keeps}
        sent = self._answered(chunk, round_, question, server, own, strict=strict)
        if question.trains and round_:  # in round 0 clients are only tried out
            self.attacking.attack_alone(sent, round_)
        sent.wire = dict(sent.values)
        return self._filters.passed(sent, round_, filters) if question.trains else sent

    def _answered(
        self, chunk: Chunk, round_: int, question: Question, server: Server, own: Mapping[str, Tensor], *, strict: bool
    ) -> Sent:
        seeded(
            derive_seed(self._config.seed, random_streams.DROPOUT, round_, int(chunk.clients[0])), self._model.device
        )
        ids, there = self._batches(chunk, round_) if question.takes_steps else _no_batches(chunk)
        one = One(
            self._config,
            self._model,
            question,
            server.shared if question.model is None else question.model.to(self._model.dtype),
            server.statistics,
            self._broadcast(question, server),
            chunk.steps,
            self.sgd(round_),
            round_,
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

    def sgd(self, round_: int) -> Sgd:
        """Return how clients that begin in this round take their steps; round 0 tries clients out."""
        config = self._config
        schedule = parts.learning_rate(config.client_lr_schedule)
        factor = schedule.factor(max(1, round_), config.rounds, **config.options_of(config.client_lr_schedule))
        rate = config.learning_rate * max(factor, LEAST_FACTOR)
        return Sgd(rate, config.client_momentum, config.client_weight_decay)

    def _batches(self, chunk: Chunk, round_: int) -> tuple[Ids, NDArray[np.bool_]]:
        owned = [self._divided.train[client] for client in chunk.clients]
        seed = derive_seed(self._config.seed, random_streams.SHUFFLE)
        return batches(chunk, owned, self._config.batch, seed=seed, round_=round_)

    def _together(
        self, one: One, chunk: Chunk, ids: Ids, there: Any, own: Mapping[str, Tensor], counts: Tensor
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
        self, one: One, chunk: Chunk, ids: Ids, there: Any, own: Mapping[str, Tensor], counts: Tensor
    ) -> Sent:
        done: list[Any] = []
        failed: dict[int, str] = {}
        seconds = []
        for place, client in enumerate(chunk.clients.tolist()):
            began = time.perf_counter()
            mine = {name: values[place] for name, values in own.items()}
            try:
                steps = [self._look_up(step[held], (-1,)) for step, held in zip(ids[place], there[place], strict=True)]
                whole = None
                if one.question.is_whole:
                    whole = (self._look_up(self._divided.train[client], (-1,)), None)
                who = torch.tensor(client, device=self._model.device)
                done.append(one(mine, who, counts[place], steps, None, whole))
            except (ConfigError, DataError):
                raise  # of all of them
            except (Exception, SystemExit) as error:  # a library that was made for the command line may exit
                failed[client] = client_failures.traceback_of(error)
                done.append(None)
            seconds.append(time.perf_counter() - began)
        sent = _gathered(chunk, done, failed, own, has_losses=one.question.trains)
        sent.seconds = seconds
        return sent

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


def seeded(seed: int, device: torch.device) -> None:
    """Whatever somebody's code draws from: Python, numpy, and torch on this device.

    torch.manual_seed takes a millisecond on a CPU, to note it for absent devices.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (what others' code draws from is this one)
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
