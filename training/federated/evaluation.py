"""How good the global model is, for all and for each client: every sample is looked at once, by whichever rank."""

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
from training.federated.client_computation import fill
from training.federated.client_failures import ClientsFailed
from training.federated.client_tasks import Question
from training.federated.client_work import Work
from training.federated.model import PERSONAL, STATISTICS, Model
from training.federated.schedule import Chunk, cut, widths_of
from training.federated.server import Server
from training.federation.data_division import Divided
from training.runtime.distributed import World, gather

BATCH, UNITS = 1024, 8192
"""Samples that are looked at together, and tokens of such as have some: a function of the data alone."""


@dataclass(frozen=True)
class Judged:
    """Means by name of what a recipe scores, "loss" among them."""

    means: dict[str, float]
    by_client: dict[str, NDArray[np.float64]]
    """(clients,): over each client's own; NaN: it has none."""
    finetuned: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """(clients,): the same, after each client has taken some steps on its own data; empty: none have."""
    finetuned_means: dict[str, float] = field(default_factory=dict)
    """Over all samples."""


@dataclass(frozen=True)
class Batched:
    """Hold what is scored at once."""

    score: Callable[[], tuple[Ids, dict[str, Tensor]]]
    """Return the samples and their scores (samples,) by name."""
    clients: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Whose state it takes."""


class Judge:
    """Looks at what was kept for validation."""

    def __init__(
        self,
        model: Model,
        divided: Divided,
        world: World,
        *,
        alone: bool,
        work: Work | None = None,
        finetune_steps: int = 0,
    ) -> None:
        """`alone`: models of several clients are not computed together. `work`: takes the steps of fine-tuning."""
        self._work, self._finetune_steps = work, finetune_steps
        self._model, self._divided, self._world, self._alone = model, divided, world, alone
        self._samples = len(divided.owners["validation"])
        self._ids = np.setdiff1d(np.arange(self._samples), divided.root)
        self._batch = max(1, min(BATCH, UNITS // model.task.units_per_sample))

    def judge(self, server: Server, *, goes_on: Callable[[], bool], round_: int = 0) -> Judged | None:
        """None if `goes_on`, which all ranks ask after every batch, said no. `round_`: whose rate fine-tuning takes."""
        self._model.task.model.eval()
        found = []
        try:
            with torch.no_grad():
                for batches in self._batches(server):
                    scores = self._all(server, batches, goes_on)
                    if scores is None:
                        return None
                    found.append(scores)
                tuned = self._all(server, self._finetuned(server, round_), goes_on) if self._finetune_steps else {}
                if tuned is None:
                    return None
        finally:
            self._model.task.model.train()
            server.kept.release()
        judged = self._judged(found[-1], by_client=found[0])
        if not tuned:
            return judged
        after = self._judged(tuned, by_client=tuned)
        return replace(judged, finetuned=after.by_client, finetuned_means=after.means)

    def _batches(self, server: Server) -> Iterator[list[Batched]]:
        """Of what clients are judged by, and then of what all are, where that is another."""
        is_personal = self._is_personal(server)
        if self._model.task.judge is not None:
            yield self._in_their_own_way(server, is_personal=is_personal)
            return
        if is_personal:
            yield self._own(server)
        if not is_personal or self._model.algorithm.JUDGES_BOTH:
            yield self._same(server)

    def _is_personal(self, server: Server) -> bool:
        """Whether clients are judged by models of their own."""
        return self._has_own_models() or PERSONAL in server.kept or STATISTICS in server.kept

    def _has_own_models(self) -> bool:
        """Return whether the algorithm gives clients models of their own to use."""
        from training.federation.parts import Algorithm

        return self._model.algorithm.own is not Algorithm.__dataclass_fields__["own"].default

    def _same(self, server: Server) -> list[Batched]:
        """One model for all: batches of samples, whoever's they are."""

        def look(ids: Ids) -> tuple[Ids, dict[str, Tensor]]:
            return ids, self._scores(server.weights, server.statistics, self._look_up(ids))

        ids, batch = self._ids, self._batch
        return [Batched(partial(look, part)) for part in np.split(ids, range(batch, len(ids), batch))]

    def _own(self, server: Server) -> list[Batched]:
        """A model each: several clients together, which have about as much."""
        sizes = np.array([len(ids) for ids in self._divided.validation])
        some = np.flatnonzero(sizes)
        ones = np.ones(len(some), dtype=np.int64)
        widths = widths_of(sizes[some], int(sizes.max(initial=1)))
        chunks = cut(some, ones, widths, numbers=self._model.weights.size, alone=self._alone)
        return [Batched(partial(self._looked, server, chunk), chunk.clients) for chunk in chunks]

    def _looked(self, server: Server, chunk: Chunk) -> tuple[Ids, dict[str, Tensor]]:
        kept = server.kept.rows_of(chunk.clients)
        return self._score_each(chunk.clients, chunk.width, kept, lambda kept: self._own_model(server, kept))

    def _score_each(
        self,
        clients: Ids,
        width: int,
        kept: dict[str, Tensor],
        model_of: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]],
    ) -> tuple[Ids, dict[str, Tensor]]:
        """Return the scores of clients by models of their own. `kept`: (clients, …), of which `model_of` makes a
        client's weights and statistics; `width`: places for the samples of each."""
        own = [self._divided.validation[client] for client in clients.tolist()]
        if self._alone:
            found = [
                self._scores(*model_of({n: v[i] for n, v in kept.items()}), self._look_up(part))
                for i, ids in enumerate(own)
                for part in np.split(ids, range(self._batch, len(ids), self._batch))
            ]
            return np.concatenate(own), {name: torch.cat([one[name] for one in found]) for name in found[0]}
        ids = np.stack([np.resize(mine, width) for mine in own])  # what is repeated is left out again
        batch = tuple(part.reshape(*ids.shape, *part.shape[1:]) for part in self._look_up(ids.reshape(-1)))
        scores = vmap(lambda kept, batch: self._scores(*model_of(kept), batch))(kept, batch)
        there = torch.from_numpy(np.arange(width) < np.array([len(mine) for mine in own])[:, None])
        return np.concatenate(own), {name: values[there.to(values.device)] for name, values in scores.items()}

    def _finetuned(self, server: Server, round_: int) -> list[Batched]:
        """Each client's model after steps on its own data, on a copy: nothing that training goes on with changes."""
        work = self._work
        assert work is not None
        judged = np.array([len(ids) for ids in self._divided.validation])
        some = np.flatnonzero((judged > 0) & (self._divided.sizes > 0))
        steps = np.full(len(some), self._finetune_steps)
        widths = widths_of(self._divided.sizes[some], work.batch)
        chunks = cut(some, steps, widths, numbers=work.numbers, alone=bool(work.alone))
        question = Question("finetune", self._steps_of, {}, takes_steps=True)

        def look(chunk: Chunk) -> tuple[Ids, dict[str, Tensor]]:
            self._model.task.model.train()
            sent = work.run(chunk, round_, question, server)
            self._model.task.model.eval()
            fine = ~np.isin(chunk.clients, list(sent.failed))
            clients, models = chunk.clients[fine], {n: v[torch.from_numpy(fine)] for n, v in sent.values.items()}
            if not len(clients):
                return np.zeros(0, dtype=np.int64), {}
            if self._model.task.judge is not None:
                return self._judge_each(clients, models)
            width = int(widths_of(judged[clients], int(judged.max())).max())
            return self._score_each(clients, width, models, lambda model: (model["weights"], model[STATISTICS]))

        return [Batched(partial(look, chunk), chunk.clients) for chunk in chunks]

    def _steps_of(self, client: Client) -> dict[str, Tensor]:
        """Return where a client's steps lead from the model that it is judged by."""
        algorithm, begin = self._model.algorithm, None
        if self._has_own_models():
            begin = algorithm.own(client.model, client.kept, **self._model.options)
        return {"weights": client.descend(begin=begin), STATISTICS: client.statistics}

    def _judge_each(self, clients: Ids, models: dict[str, Tensor]) -> tuple[Ids, dict[str, Tensor]]:
        """Return the scores of clients that are judged by an evaluate() of the user's."""
        ids = [self._divided.validation[client] for client in clients.tolist()]
        found = [
            self._own_scores(int(client), models["weights"][place], models[STATISTICS][place], ids[place])
            for place, client in enumerate(clients)
        ]
        many = torch.tensor([len(some) for some in ids])
        scores = {name: torch.tensor([one[name] for one in found], dtype=torch.float64) for name in found[0]}
        return np.concatenate(ids), {name: values.repeat_interleave(many) for name, values in scores.items()}

    def _in_their_own_way(self, server: Server, *, is_personal: bool) -> list[Batched]:
        """A client each, all that it keeps for validation at once."""

        def look(client: int) -> tuple[Ids, dict[str, Tensor]]:
            ids = self._divided.validation[client]
            weights, statistics = server.weights, server.statistics
            if is_personal:
                kept = server.kept.rows_of(np.array([client]))
                weights, statistics = self._own_model(server, {name: values[0] for name, values in kept.items()})
            scores = self._own_scores(client, weights, statistics, ids)
            return ids, {name: torch.full((len(ids),), value, dtype=torch.float64) for name, value in scores.items()}

        clients = [client for client, ids in enumerate(self._divided.validation) if len(ids)]
        return [
            Batched(partial(look, client), np.array([client] if is_personal else [], dtype=np.int64))
            for client in clients
        ]

    def _own_scores(self, client: int, weights: Tensor, statistics: Tensor, ids: Ids) -> dict[str, float]:
        task, model = self._model.task, self._model
        assert task.judge is not None
        module = copy.deepcopy(task.model)
        fill(module, {**model.weights.tensors(weights), **model.statistics.tensors(statistics)})
        module.eval()
        try:
            scores = dict(task.judge(module, self._look_up(ids)))
        except Exception as error:
            raise ClientsFailed(f"client {client} can't be judged", client_failures.traceback_of(error)) from None
        if "loss" not in scores:
            scores["loss"] = float(self._scores(weights, statistics, self._look_up(ids))["loss"].mean())
        return scores

    def _own_model(self, server: Server, kept: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Weights and running statistics of one client."""
        weights = server.weights
        if PERSONAL in kept:
            weights = torch.cat([server.shared, kept[PERSONAL]])
        weights = self._model.algorithm.own(weights, kept, **self._model.options)
        return weights, kept.get(STATISTICS, server.statistics)

    def _scores(self, weights: Tensor, statistics: Tensor, batch: Batch) -> dict[str, Tensor]:
        """(samples,) by name."""
        task = self._model.task
        tensors = {**self._model.weights.tensors(weights), **self._model.statistics.tensors(statistics)}

        def model(*inputs: Tensor, **named: Any) -> Tensor:
            answer: Tensor = functional_call(task.model, tensors, inputs, named)
            return answer

        if task.each is not None:
            return {name: values.double() for name, values in task.each(model, batch).items()}
        return _one_by_one(task, model, batch)

    def _look_up(self, ids: Ids) -> Batch:
        device, dtype = self._model.device, self._model.dtype
        found = self._model.task.batch("validation", ids)
        return tuple(part.to(device, dtype if part.is_floating_point() else None) for part in found)

    def _all(
        self, server: Server, batches: list[Batched], goes_on: Callable[[], bool]
    ) -> dict[str, NDArray[np.float64]] | None:
        """(samples,) by name, the same on every rank: each looks at some of the batches."""
        mine = []
        ranks = self._world.size
        for begin in range(0, len(batches), ranks):
            turn = batches[begin : begin + ranks]
            server.kept.borrow([batch.clients for batch in turn])
            if self._world.rank < len(turn):
                ids, scores = turn[self._world.rank].score()
                mine.append((ids, {name: values.cpu().numpy() for name, values in scores.items()}))
            if not goes_on():
                return None
        found: dict[str, NDArray[np.float64]] = {}
        for parts in gather(self._world, mine):
            for ids, scores in parts:
                for name, values in scores.items():
                    found.setdefault(name, np.full(self._samples, np.nan))[ids] = values
        return found

    def _judged(self, scores: dict[str, NDArray[np.float64]], *, by_client: dict[str, NDArray[np.float64]]) -> Judged:
        known = {name: values[~np.isnan(values)] for name, values in scores.items()}
        means = {name: float(values.mean()) if len(values) else float("nan") for name, values in known.items()}
        means.setdefault("loss", float("nan"))  # nothing was kept for validation
        return Judged(means, {name: self._by_client(values) for name, values in by_client.items()})

    def _by_client(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        owners = self._divided.owners["validation"]
        owned = ~np.isnan(values) & (owners >= 0)
        sums = np.bincount(owners[owned], values[owned], minlength=self._divided.clients)
        counts = np.bincount(owners[owned], minlength=self._divided.clients)
        with np.errstate(invalid="ignore"):
            found: NDArray[np.float64] = sums / counts
        return found


def _one_by_one(task: Task, model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    found = [task.score(model, tuple(part[i : i + 1] for part in batch)) for i in range(len(batch[0]))]
    return {name: torch.stack([score[name].double() for score in found]) for name in found[0]}
