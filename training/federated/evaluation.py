"""Evaluate the model for all clients and for each: every validation sample is scored once, by one of the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, vmap

from training.data import Batch, Ids, Task
from training.federated import client_failures
from training.federated.client import Client
from training.federated.client_computation import load_tensors
from training.federated.client_failures import ClientsFailed
from training.federated.client_tasks import ClientTask
from training.federated.client_work import ClientWork
from training.federated.model import PERSONAL, STATISTICS, Model
from training.federated.schedule import ClientChunk, make_chunks, widths_of
from training.federated.server import Server
from training.federation.data_division import DataDivision
from training.runtime.distributed import World, gather

BATCH, UNITS = 1024, 8192
"""Samples that are scored together, and tokens where samples have several: a function of the data alone."""


@dataclass(frozen=True)
class Evaluation:
    """Mean scores of a validation by name, "loss" among them."""

    means: dict[str, float]
    by_client: dict[str, NDArray[np.float64]]
    """(clients,) by name: the mean over each client's samples; NaN if it has none."""
    finetuned: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """(clients,) by name: the same after each client has fine-tuned the model; empty without fine-tuning."""
    finetuned_means: dict[str, float] = field(default_factory=dict)
    """Means over all samples after fine-tuning."""


@dataclass(frozen=True)
class ScoringBatch:
    """Samples that one rank scores at once."""

    score: Callable[[], tuple[Ids, dict[str, Tensor]]]
    """Return the samples and their scores (samples,) by name."""
    clients: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Clients whose state the scores need."""


class Evaluator:
    """Scores the validation samples."""

    def __init__(
        self,
        model: Model,
        divided: DataDivision,
        world: World,
        *,
        is_unstacked: bool,
        work: ClientWork | None = None,
        finetune_steps: int = 0,
    ) -> None:
        """`is_unstacked`: score clients one by one. `work`: computes the steps of fine-tuning."""
        self._work, self._finetune_steps = work, finetune_steps
        self._model, self._divided, self._world, self._is_unstacked = model, divided, world, is_unstacked
        self._samples = len(divided.owners["validation"])
        self._ids = np.setdiff1d(np.arange(self._samples), divided.root)
        self._batch = max(1, min(BATCH, UNITS // model.task.units_per_sample))

    def evaluate(self, server: Server, *, should_continue: Callable[[], bool], round_: int = 0) -> Evaluation | None:
        """Return the evaluation; None if `should_continue`, which all ranks call after each batch, returned False.

        `round_`: the round whose learning rate fine-tuning uses.
        """
        self._model.task.model.eval()
        found = []
        try:
            with torch.no_grad():
                for batches in self._batches(server):
                    scores = self._score_all(server, batches, should_continue)
                    if scores is None:
                        return None
                    found.append(scores)
                finetuned = (
                    self._score_all(server, self._finetuned_batches(server, round_), should_continue)
                    if self._finetune_steps
                    else {}
                )
                if finetuned is None:
                    return None
        finally:
            self._model.task.model.train()
            server.client_state.release()
        result = self._summary(found[-1], by_client=found[0])
        if not finetuned:
            return result
        after = self._summary(finetuned, by_client=finetuned)
        return replace(result, finetuned=after.by_client, finetuned_means=after.means)

    def _batches(self, server: Server) -> Iterator[list[ScoringBatch]]:
        """Yield the batches of the clients' own models, if they have such, and then those of the global model."""
        is_personal = self._is_personal(server)
        if self._model.task.evaluate is not None:
            yield self._custom_batches(server, is_personal=is_personal)
            return
        if is_personal:
            yield self._personal_batches(server)
        if not is_personal or self._model.algorithm.EVALUATES_SERVER_MODEL:
            yield self._global_batches(server)

    def _is_personal(self, server: Server) -> bool:
        """Return whether each client is evaluated with a model of its own."""
        has_personalized = self._model.algorithm.has_personalized_model
        return has_personalized or PERSONAL in server.client_state or STATISTICS in server.client_state

    def _global_batches(self, server: Server) -> list[ScoringBatch]:
        """Return batches of samples, of any client, for the global model."""

        def score(ids: Ids) -> tuple[Ids, dict[str, Tensor]]:
            return ids, self._scores(server.weights, server.statistics, self._load(ids))

        ids, batch = self._ids, self._batch
        return [ScoringBatch(partial(score, part)) for part in np.split(ids, range(batch, len(ids), batch))]

    def _personal_batches(self, server: Server) -> list[ScoringBatch]:
        """Return batches of clients with about equally many samples, for their own models."""
        sizes = np.array([len(ids) for ids in self._divided.validation])
        evaluated = np.flatnonzero(sizes)
        ones = np.ones(len(evaluated), dtype=np.int64)
        widths = widths_of(sizes[evaluated], int(sizes.max(initial=1)))
        chunks = make_chunks(
            evaluated, ones, widths, parameters=self._model.weights.size, is_unstacked=self._is_unstacked
        )
        return [ScoringBatch(partial(self._score_chunk, server, chunk), chunk.clients) for chunk in chunks]

    def _score_chunk(self, server: Server, chunk: ClientChunk) -> tuple[Ids, dict[str, Tensor]]:
        state = server.client_state.rows_of(chunk.clients)
        return self._score_each(chunk.clients, chunk.width, state, lambda state: self._personal_model(server, state))

    def _score_each(
        self,
        clients: Ids,
        width: int,
        state: dict[str, Tensor],
        model_of: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]],
    ) -> tuple[Ids, dict[str, Tensor]]:
        """Return the sample ids and scores of clients by their own models.

        `state` (clients, …): what `model_of` makes a client's weights and statistics of. `width`: samples that each
        client is padded to.
        """
        ids_by_client = [self._divided.validation[client] for client in clients.tolist()]
        if self._is_unstacked:
            found = [
                self._scores(*model_of({n: v[i] for n, v in state.items()}), self._load(part))
                for i, ids in enumerate(ids_by_client)
                for part in np.split(ids, range(self._batch, len(ids), self._batch))
            ]
            return np.concatenate(ids_by_client), {name: torch.cat([part[name] for part in found]) for name in found[0]}
        ids = np.stack(
            [np.resize(client_ids, width) for client_ids in ids_by_client]
        )  # padding by repetition, removed below
        batch = tuple(part.reshape(*ids.shape, *part.shape[1:]) for part in self._load(ids.reshape(-1)))
        scores = vmap(lambda state, batch: self._scores(*model_of(state), batch))(state, batch)
        is_sample = torch.from_numpy(
            np.arange(width) < np.array([len(client_ids) for client_ids in ids_by_client])[:, None]
        )
        return np.concatenate(ids_by_client), {
            name: values[is_sample.to(values.device)] for name, values in scores.items()
        }

    def _finetuned_batches(self, server: Server, round_: int) -> list[ScoringBatch]:
        """Return batches for each client's model after steps on its own data, on a copy: training is not affected."""
        work = self._work
        assert work is not None
        evaluated = np.array([len(ids) for ids in self._divided.validation])
        clients = np.flatnonzero((evaluated > 0) & (self._divided.sizes > 0))
        steps = np.full(len(clients), self._finetune_steps)
        widths = widths_of(self._divided.sizes[clients], work.batch)
        chunks = make_chunks(
            clients, steps, widths, parameters=work.parameters, is_unstacked=bool(work.unstacked_reason)
        )
        task = ClientTask("finetune", self._finetune, {}, takes_steps=True)

        def score(chunk: ClientChunk) -> tuple[Ids, dict[str, Tensor]]:
            self._model.task.model.train()
            sent = work.run(chunk, round_, task, server)
            self._model.task.model.eval()
            has_trained = ~np.isin(chunk.clients, list(sent.failed))
            valid_clients, models = (
                chunk.clients[has_trained],
                {n: v[torch.from_numpy(has_trained)] for n, v in sent.values.items()},
            )
            if not len(valid_clients):
                return np.zeros(0, dtype=np.int64), {}
            if self._model.task.evaluate is not None:
                return self._score_custom(valid_clients, models)
            width = int(widths_of(evaluated[valid_clients], int(evaluated.max())).max())
            return self._score_each(valid_clients, width, models, lambda model: (model["weights"], model[STATISTICS]))

        return [ScoringBatch(partial(score, chunk), chunk.clients) for chunk in chunks]

    def _finetune(self, client: Client) -> dict[str, Tensor]:
        """Return the weights and statistics after a client's steps from the model that it is evaluated with."""
        algorithm, begin = self._model.algorithm, None
        if algorithm.has_personalized_model:
            begin = algorithm.personalized_model(client.model, client.state, **self._model.options)
        return {"weights": client.descend(begin=begin), STATISTICS: client.statistics}

    def _score_custom(self, clients: Ids, models: dict[str, Tensor]) -> tuple[Ids, dict[str, Tensor]]:
        """Return the sample ids and scores of clients by evaluate() of client.py."""
        ids = [self._divided.validation[client] for client in clients.tolist()]
        found = [
            self._custom_scores(int(client), models["weights"][place], models[STATISTICS][place], ids[place])
            for place, client in enumerate(clients)
        ]
        many = torch.tensor([len(some) for some in ids])
        scores = {
            name: torch.tensor([client_scores[name] for client_scores in found], dtype=torch.float64)
            for name in found[0]
        }
        return np.concatenate(ids), {name: values.repeat_interleave(many) for name, values in scores.items()}

    def _custom_batches(self, server: Server, *, is_personal: bool) -> list[ScoringBatch]:
        """Return a batch for each client, all of its validation samples at once, for evaluate() of client.py."""

        def score(client: int) -> tuple[Ids, dict[str, Tensor]]:
            ids = self._divided.validation[client]
            weights, statistics = server.weights, server.statistics
            if is_personal:
                state = server.client_state.rows_of(np.array([client]))
                weights, statistics = self._personal_model(server, {name: values[0] for name, values in state.items()})
            scores = self._custom_scores(client, weights, statistics, ids)
            return ids, {name: torch.full((len(ids),), value, dtype=torch.float64) for name, value in scores.items()}

        clients = [client for client, ids in enumerate(self._divided.validation) if len(ids)]
        return [
            ScoringBatch(partial(score, client), np.array([client] if is_personal else [], dtype=np.int64))
            for client in clients
        ]

    def _custom_scores(self, client: int, weights: Tensor, statistics: Tensor, ids: Ids) -> dict[str, float]:
        task, model = self._model.task, self._model
        assert task.evaluate is not None
        module = copy.deepcopy(task.model)
        load_tensors(module, {**model.weights.tensors(weights), **model.statistics.tensors(statistics)})
        module.eval()
        try:
            scores = dict(task.evaluate(module, self._load(ids)))
        except Exception as error:
            raise ClientsFailed(f"client {client} can't be evaluated", client_failures.traceback_of(error)) from None
        if "loss" not in scores:
            scores["loss"] = float(self._scores(weights, statistics, self._load(ids))["loss"].mean())
        return scores

    def _personal_model(self, server: Server, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the weights and running statistics that one client is evaluated with."""
        weights = server.weights
        if PERSONAL in state:
            weights = torch.cat([server.shared, state[PERSONAL]])
        weights = self._model.algorithm.personalized_model(weights, state, **self._model.options)
        return weights, state.get(STATISTICS, server.statistics)

    def _scores(self, weights: Tensor, statistics: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the scores (samples,) by name."""
        task = self._model.task
        tensors = {**self._model.weights.tensors(weights), **self._model.statistics.tensors(statistics)}

        def model(*inputs: Tensor, **named: Any) -> Tensor:
            answer: Tensor = functional_call(task.model, tensors, inputs, named)
            return answer

        if task.score_samples is not None:
            return {name: values.double() for name, values in task.score_samples(model, batch).items()}
        return _score_samples_in_turn(task, model, batch)

    def _load(self, ids: Ids) -> Batch:
        device, dtype = self._model.device, self._model.dtype
        found = self._model.task.batch("validation", ids)
        return tuple(part.to(device, dtype if part.is_floating_point() else None) for part in found)

    def _score_all(
        self, server: Server, batches: list[ScoringBatch], should_continue: Callable[[], bool]
    ) -> dict[str, NDArray[np.float64]] | None:
        """Score all batches, each on one rank. Return (samples,) by name, equal on every rank."""
        local_scores = []
        ranks = self._world.size
        for begin in range(0, len(batches), ranks):
            turn = batches[begin : begin + ranks]
            server.client_state.borrow([batch.clients for batch in turn])
            if self._world.rank < len(turn):
                ids, scores = turn[self._world.rank].score()
                local_scores.append((ids, {name: values.cpu().numpy() for name, values in scores.items()}))
            if not should_continue():
                return None
        found: dict[str, NDArray[np.float64]] = {}
        for parts in gather(self._world, local_scores):
            for ids, scores in parts:
                for name, values in scores.items():
                    found.setdefault(name, np.full(self._samples, np.nan))[ids] = values
        return found

    def _summary(
        self, scores: dict[str, NDArray[np.float64]], *, by_client: dict[str, NDArray[np.float64]]
    ) -> Evaluation:
        scored = {name: values[~np.isnan(values)] for name, values in scores.items()}
        means = {name: float(values.mean()) if len(values) else float("nan") for name, values in scored.items()}
        means.setdefault("loss", float("nan"))  # there are no validation samples
        return Evaluation(means, {name: self._by_client(values) for name, values in by_client.items()})

    def _by_client(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        owners = self._divided.owners["validation"]
        owned = ~np.isnan(values) & (owners >= 0)
        sums = np.bincount(owners[owned], values[owned], minlength=self._divided.clients)
        counts = np.bincount(owners[owned], minlength=self._divided.clients)
        with np.errstate(invalid="ignore"):
            found: NDArray[np.float64] = sums / counts
        return found


def _score_samples_in_turn(task: Task, model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    found = [task.score(model, tuple(part[i : i + 1] for part in batch)) for i in range(len(batch[0]))]
    return {name: torch.stack([score[name].double() for score in found]) for name in found[0]}
