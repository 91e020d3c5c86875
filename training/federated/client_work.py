"""Compute chunks of clients: stacked by vmap, or one after the other.

A rule decides which of the two, never a timing: their last bits differ, and a run that is resumed, or continues on
fewer ranks, must arrive at the same model.
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

from training.config.base import ConfigError
from training.corpus.errors import DataError
from training.data import Batch, Split
from training.federated import attention, client_failures
from training.federated.attack_simulation import AttackSimulation
from training.federated.client import ClientInputs, Sgd
from training.federated.client_computation import ClientComputation
from training.federated.client_failures import ClientsFailed
from training.federated.client_tasks import ClientTask, ClientUpdates
from training.federated.filter_chain import FilterChain
from training.federated.messages import MessageLayout, MessagePair
from training.federated.model import Model
from training.federated.schedule import ClientChunk, Ids, batches, widths_of
from training.federation import parts, random_streams
from training.federation.config import FederationConfig
from training.federation.data_division import DataDivision
from training.federation.round_plan import steps_of
from training.runtime.seeds import derive_seed

if TYPE_CHECKING:
    from training.federated.server import Server

MIN_LEARNING_RATE_FACTOR = 1e-12
"""Lower bound of the schedule's factor on the learning rate: some algorithms divide by the rate."""
PROBED_CLIENTS = 5
"""Number of clients that are tried before the first round. If all of them fail, the program is at fault."""


class ClientWork:
    """Computes chunks of clients on one rank."""

    def __init__(
        self,
        config: FederationConfig,
        model: Model,
        divided: DataDivision,
        filters: FilterChain,
        *,
        unstacked_reason: str,
        split: Split = "train",
    ) -> None:
        """`unstacked_reason`: why clients are computed one by one; "" if they are stacked.

        `split`: their samples' split.
        """
        self._config, self._model, self._divided, self._split = config, model, divided, split
        self._filters, self.unstacked_reason = filters, unstacked_reason
        self.attack = AttackSimulation(config)
        self._sizes: dict[str, tuple[dict[str, int], MessagePair]] = {}
        algorithm = model.algorithm
        self.training_task = ClientTask(
            "train",
            lambda client: algorithm.train(client, **model.options),
            algorithm.sent(model.options),
            fold=algorithm.fold,
            uses_all_samples=algorithm.USES_ALL_SAMPLES,
            takes_steps=algorithm.TAKES_STEPS,
            is_training=True,
        )

    @property
    def batch(self) -> int:
        return self._config.batch

    @property
    def seed(self) -> int:
        return self._config.seed

    def full_steps(self, clients: Ids) -> Ids:
        """Return how many steps each of these clients takes in a whole round."""
        config = self._config
        sizes = self._divided.sizes[clients]
        return steps_of(sizes, config.batch, epochs=config.epochs, local_steps=config.local_steps)

    @property
    def parameters(self) -> int:
        """Return the number of parameters, frozen ones included.

        The activations behind them take memory for each client.
        """
        return self._model.parameter_count

    def samples_of(self, clients: Ids) -> NDArray[np.int64]:
        """Return the number of training samples of each of these clients."""
        return self._divided.sizes[clients]

    def sizes_of(self, task: ClientTask, server: Server) -> dict[str, int]:
        """Return the size of each vector that the server sums, by name."""
        return self._probed(task, server)[0]

    def messages_of(self, task: ClientTask, server: Server) -> MessagePair:
        """Return the layouts of the message to one client and of its answer."""
        return self._probed(task, server)[1]

    def probe(self, server: Server) -> None:
        """Compute one client and discard the result, to learn whether stacking works and what a client sends."""
        self._probed(self.training_task, server)

    def _probed(self, task: ClientTask, server: Server) -> tuple[dict[str, int], MessagePair]:
        """Return the sizes and messages of a task, which the first call learns by computing one client."""
        if task.name not in self._sizes:
            sent = self._probe_clients(task, server)
            sizes = {name: value.shape[1] for name, value in task.summands(sent.values).items()}
            self._sizes[task.name] = sizes, self._message_pair(task, server, sent)
        return self._sizes[task.name]

    def _probe_clients(self, task: ClientTask, server: Server) -> ClientUpdates:
        """Return the updates of the first client that works, trying those with least data first.

        One broken client must not end the run; ClientsFailed if PROBED_CLIENTS of them fail.
        """
        failed: dict[int, str] = {}
        for client in np.argsort(self._divided.sizes, kind="stable")[:PROBED_CLIENTS]:
            client_ids = np.array([client])
            chunk = ClientChunk(client_ids, 1, int(widths_of(self._divided.sizes[client_ids], self.batch)[0]))
            sent = self._probe_client(chunk, task, server)
            if not sent.failed:
                return sent
            failed |= sent.failed
        first, text = next(iter(failed.items()))
        raise ClientsFailed(f"all {len(failed)} clients that were tried out failed; client {first} failed with", text)

    def _probe_client(self, chunk: ClientChunk, task: ClientTask, server: Server) -> ClientUpdates:
        """Compute one client. If only stacking fails, all clients are computed one by one from now on."""
        initial = server.client_state.initial_rows(len(chunk.clients))  # every rank has these, and any client's will do
        if self.unstacked_reason or not task.is_training:
            return self.run(chunk, 0, task, server, state=initial)
        try:
            return self.run(chunk, 0, task, server, state=initial, strict=True)
        except Exception as error:
            self.unstacked_reason = f"torch can't stack it: {' '.join(str(error).split())[:200]}"
        sent = self.run(chunk, 0, task, server, state=initial)
        if sent.failed:
            self.unstacked_reason = ""
        return sent

    def _message_pair(self, task: ClientTask, server: Server, sent: ClientUpdates) -> MessagePair:
        model = self._model
        shapes = {**model.weights.shared_shapes, **model.statistics.shared_shapes} if task.is_training else {}
        down = {name: (tuple(shape), model.dtype) for name, shape in shapes.items()}
        broadcast = self._broadcast(task, server)
        down |= {f"server.{name}": (tuple(value.shape), value.dtype) for name, value in broadcast.items()}
        return MessagePair(
            up=MessageLayout.of({name: value[0] for name, value in sent.wire.items()}), down=MessageLayout(down)
        )

    def _broadcast(self, task: ClientTask, server: Server) -> dict[str, Tensor]:
        memory = {name: server.memory[name] for name in self._model.algorithm.BROADCAST} if task.is_training else {}
        return {name: value.to(self._model.dtype) for name, value in {**memory, **task.vectors}.items()}

    def run(
        self,
        chunk: ClientChunk,
        round_: int,
        task: ClientTask,
        server: Server,
        *,
        state: dict[str, Tensor] | None = None,
        strict: bool = False,
    ) -> ClientUpdates:
        """Compute a chunk and return what its clients send.

        `state` (clients, …) by name: their state, else the rows that the round has borrowed. `strict`: raise what fails
        for all stacked clients together, instead of computing them one by one.
        """
        state = server.client_state.rows_of(chunk.clients) if state is None else dict(state)
        filters = {name: state.pop(name) for name in self._filters.state_names}
        sent = self._compute(chunk, round_, task, server, state, strict=strict)
        if task.is_training and round_:  # round 0 is the probe before the first round
            self.attack.forge_independently(sent, round_)
        sent.wire = dict(sent.values)
        return self._filters.apply(sent, round_, filters) if task.is_training else sent

    def _compute(
        self,
        chunk: ClientChunk,
        round_: int,
        task: ClientTask,
        server: Server,
        state: Mapping[str, Tensor],
        *,
        strict: bool,
    ) -> ClientUpdates:
        seed_generators(
            derive_seed(self._config.seed, random_streams.DROPOUT, round_, int(chunk.clients[0])), self._model.device
        )
        ids, is_sample = self._batches(chunk, round_) if task.takes_steps else _no_batches(chunk)
        inputs = ClientInputs(
            model=server.shared if task.model is None else task.model.to(self._model.dtype),
            statistics=server.statistics,
            server=self._broadcast(task, server),
            steps=chunk.steps,
            sgd=self.sgd(round_),
            round=round_,
        )
        computation = ClientComputation(self._config, self._model, task, inputs)
        counts = torch.from_numpy(self._divided.sizes[chunk.clients]).to(self._model.device, self._model.dtype)
        if not self.unstacked_reason:
            try:
                return self._compute_stacked(computation, chunk, ids, is_sample, state, counts)
            except Exception:
                if strict:
                    raise
            # Some client is at fault. Computing them one by one finds out which.
        return self._compute_each(computation, chunk, ids, is_sample, state, counts)

    def sgd(self, round_: int) -> Sgd:
        """Return the options of the steps of clients that begin in this round. Round 0 is the probe."""
        config = self._config
        schedule = parts.learning_rate(config.client_lr_schedule)
        factor = schedule.factor(max(1, round_), config.rounds, **config.options_of(config.client_lr_schedule))
        rate = config.learning_rate * max(factor, MIN_LEARNING_RATE_FACTOR)
        return Sgd(rate, config.client_momentum, config.client_weight_decay)

    def _batches(self, chunk: ClientChunk, round_: int) -> tuple[Ids, NDArray[np.bool_]]:
        owned = [self._divided.train[client] for client in chunk.clients]
        seed = derive_seed(self._config.seed, random_streams.SHUFFLE)
        return batches(chunk, owned, self._config.batch, seed=seed, round_=round_)

    def _compute_stacked(
        self,
        computation: ClientComputation,
        chunk: ClientChunk,
        ids: Ids,
        is_sample: Any,
        state: Mapping[str, Tensor],
        counts: Tensor,
    ) -> ClientUpdates:
        batch = self._load(ids.reshape(-1), ids.shape)
        weights = torch.from_numpy(is_sample).to(self._model.device, self._model.dtype)
        all_samples = self._all_samples(chunk) if computation.task.uses_all_samples else None
        client_ids = torch.from_numpy(chunk.clients).to(self._model.device)
        dims = (0, 0, 0, 0, 0, None if all_samples is None else 0)
        stacked = vmap(computation, in_dims=dims, randomness="different")
        with attention.as_products():
            values, new_state, losses = stacked(dict(state), client_ids, counts, batch, weights, all_samples)
        return ClientUpdates(chunk.clients, values, new_state, losses, has_losses=computation.task.is_training)

    def _compute_each(
        self,
        computation: ClientComputation,
        chunk: ClientChunk,
        ids: Ids,
        is_sample: Any,
        state: Mapping[str, Tensor],
        counts: Tensor,
    ) -> ClientUpdates:
        results: list[Any] = []
        failed: dict[int, str] = {}
        seconds = []
        for place, client in enumerate(chunk.clients.tolist()):
            began = time.perf_counter()
            client_state = {name: values[place] for name, values in state.items()}
            try:
                steps = [
                    self._load(step[is_here], (-1,)) for step, is_here in zip(ids[place], is_sample[place], strict=True)
                ]
                all_samples = None
                if computation.task.uses_all_samples:
                    all_samples = (self._load(self._divided.train[client], (-1,)), None)
                number = torch.tensor(client, device=self._model.device)
                results.append(computation(client_state, number, counts[place], steps, None, all_samples))
            except (ConfigError, DataError):
                raise  # concerns all clients
            except (Exception, SystemExit) as error:  # a library that was written for the command line may exit
                failed[client] = client_failures.traceback_of(error)
                results.append(None)
            seconds.append(time.perf_counter() - began)
        sent = _stacked_results(chunk, results, failed, state, has_losses=computation.task.is_training)
        sent.seconds = seconds
        return sent

    def _load(self, ids: Ids, shape: Sequence[int]) -> Batch:
        """Return the samples of these ids on the device, each part of the batch as (*shape, …)."""
        device, dtype = self._model.device, self._model.dtype
        found = self._model.task.batch(self._split, ids)
        placed = (part.to(device, dtype if part.is_floating_point() else None) for part in found)
        return tuple(part.reshape(*shape, *part.shape[1:]) for part in placed)

    def _all_samples(self, chunk: ClientChunk) -> tuple[Batch, Tensor]:
        """Return all samples of each client, padded to the largest, and which places (clients, most) hold one."""
        owned = [self._divided.train[client] for client in chunk.clients]
        most = max(map(len, owned))
        ids = torch.zeros(len(owned), most, dtype=torch.int64)
        weights = torch.zeros(len(owned), most, dtype=self._model.dtype)
        for row, weight, ids_of_client in zip(ids, weights, owned, strict=True):
            row[: len(ids_of_client)] = torch.from_numpy(ids_of_client)
            weight[: len(ids_of_client)] = 1
        return self._load(ids.numpy().reshape(-1), ids.shape), weights.to(self._model.device)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators that users' code may draw from: Python's, numpy's, and torch's on this device.

    On a CPU it does without torch.manual_seed, which takes a millisecond to record the seed for absent devices.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (users' code draws from this one)
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _no_batches(chunk: ClientChunk) -> tuple[Ids, NDArray[np.bool_]]:
    nothing = np.zeros((len(chunk.clients), 0, 1), dtype=np.int64)
    return nothing, nothing.astype(bool)


def _stacked_results(
    chunk: ClientChunk, results: Sequence[Any], failed: dict[int, str], state: Mapping[str, Tensor], *, has_losses: bool
) -> ClientUpdates:
    """Stack the clients' results into one row each. A failed client's row has zeros and its state of before."""
    first = next((found for found in results if found is not None), None)
    if first is None:
        return ClientUpdates(chunk.clients, {}, dict(state), torch.full((len(results),), torch.nan), has_losses, failed)
    zeros = {name: torch.zeros_like(value) for name, value in first[0].items()}
    values = [zeros if found is None else found[0] for found in results]
    new_state = [
        {name: state[name][i] for name in first[1]} if found is None else found[1] for i, found in enumerate(results)
    ]
    losses = [first[2].new_full((), torch.nan) if found is None else found[2].detach() for found in results]
    return ClientUpdates(
        chunk.clients,
        {name: torch.stack([value[name].detach() for value in values]) for name in zeros},
        {name: torch.stack([value[name].detach() for value in new_state]) for name in first[1]},
        torch.stack(losses),
        has_losses,
        failed,
    )
