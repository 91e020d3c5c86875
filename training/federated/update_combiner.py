"""Combine a round's updates by a robust aggregation: every rank gathers all updates, and rank 0 applies the rule.

Every vector that leaves a client passes through the rule: the update, and the running statistics as their difference to
the server's. The two pass separately, because their scales have nothing in common: joined into one vector, the larger
would hide an attack on the smaller. Gathering takes the memory of one model for each client on each rank, where a sum
takes that of a few models. Rank 0 alone computes and broadcasts the result: ranks whose processors round differently
would otherwise select different clients once in a while, and continue with different models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.federated import sums
from training.federated.aggregation.norm_clipping import norms
from training.federated.assembly import Federation
from training.federated.client_tasks import SAMPLES, ClientTask
from training.federated.layout import Layout
from training.federated.model import STATISTICS
from training.federated.pending_updates import ArrivingUpdates
from training.federated.schedule import Ids
from training.federated.transport.ranks import RankExchange
from training.federated.trusted_update import TrustedUpdate
from training.federation.filter_order import UPDATE
from training.federation.parts import TooFewUpdates
from training.runtime.distributed import World, from_rank_0

MAX_WEIGHT_RATIO = 3.0
"""Upper bound of a client's weight, as a multiple of the round's median number of samples. Clients report their numbers
of samples themselves: without a bound one lie would outweigh all others in rules that weight by samples."""
FAR_RATIO = 10.0
"""A client whose running statistics were left out is reported as rejected only if they lie this many times farther from
the server's than the median client's. Krum and similar rules always leave some honest ones out."""


@dataclass(frozen=True)
class CombinedUpdates:
    """The result of combining a round's updates, equal on every rank."""

    mean: dict[str, Tensor]
    """(size,) float64 by name: the combined vectors."""
    sum: dict[str, Tensor]
    """(size,) float64 by name: the same times the total weight of the clients that count."""
    left_out: Ids
    """Clients that the rule rejected, ascending."""


@dataclass(frozen=True)
class CollectedUpdates:
    """Updates that count, in the order of their clients."""

    clients: Ids
    factors: NDArray[np.float64]
    """(clients,): factors by which late updates are discounted."""
    rows: Mapping[str, Tensor]
    """(clients, size) by name on rank 0; empty on other ranks."""


def combiner_for(federation: Federation, exchange: RankExchange, world: World) -> UpdateCombiner | None:
    """Return the combiner of a run; None if its aggregation is a weighted sum."""
    return None if federation.aggregation.IS_SUM else UpdateCombiner(federation, exchange, world)


class UpdateCombiner:
    """Gathers the clients' updates and applies the run's aggregation. All ranks call its methods in the same order."""

    def __init__(self, federation: Federation, exchange: RankExchange, world: World) -> None:
        config, work, server = federation.config, federation.work, federation.server
        self._server, self._samples = server, federation.divided.sizes
        aggregation = federation.aggregation
        self._aggregation, self._options = aggregation, config.options_of(config.aggregation)
        self._exchange, self._world = exchange, world
        sizes = work.sizes_of(work.training_task, server)
        self._like = {name: server.weights.new_empty(size) for name, size in sizes.items()}
        """Empty vectors (size,) like those that a client sends, by name."""
        self._variances = _variances(federation.model.statistics).to(world.device)
        self._trusted_update = TrustedUpdate(federation) if aggregation.TRUSTED and world.leads else None

    def rows(self, clients: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what a chunk's clients have sent, (clients, size) by name; zeros if all of them failed."""
        return {name: values.get(name, like.new_zeros(clients, len(like))) for name, like in self._like.items()}

    def combine(
        self,
        task: ClientTask,
        local_rows: Sequence[Mapping[str, Tensor]],
        rank_counts: Sequence[int],
        *,
        clients: Ids,
        counts: NDArray[np.bool_],
        late: ArrivingUpdates,
        round_: int,
    ) -> CombinedUpdates:
        """Combine a round's updates with the late ones. TooFewUpdates on every rank if there are too few to decide.

        `local_rows`: `rows` of this rank's chunks. `rank_counts`: how many clients each rank has computed. `clients`
        and `counts` (clients,): the ids of all of them, rank after rank, and whether their update counts.
        """
        collected = self._collect(local_rows, rank_counts, clients, counts, late)
        if not len(collected.clients):
            raise TooFewUpdates("no client has sent an update")
        weights = {name: self._weights(task, name, collected) for name in self._like}
        vectors: dict[str, Tensor] = {}

        def rejected_places() -> list[int] | str:
            try:
                combined, places = self._apply_rule(task, collected.rows, weights, round_)
            except TooFewUpdates as few:
                return str(few)
            vectors.update(combined)
            return places

        result = from_rank_0(self._world, rejected_places)
        if isinstance(result, str):
            raise TooFewUpdates(result)
        return _combined(self._broadcast(vectors), _zeroed(weights, result), collected.clients[result])

    def _collect(
        self,
        local_rows: Sequence[Mapping[str, Tensor]],
        rank_counts: Sequence[int],
        clients: Ids,
        counts: NDArray[np.bool_],
        late: ArrivingUpdates,
    ) -> CollectedUpdates:
        everybody = np.concatenate([clients, late.clients])
        order = np.argsort(everybody, kind="stable")
        places = order[np.concatenate([counts, np.ones(len(late.clients), dtype=bool)])[order]]
        factors = np.concatenate([np.ones(len(clients)), late.factors])[places]
        rows_of_rank = (
            {name: torch.cat([part[name] for part in local_rows]) for name in self._like} if local_rows else {}
        )
        every = self._exchange.gather_rows(rows_of_rank, rank_counts, self._like)
        rows = self._rows_at(places, every, late) if self._world.leads else {}
        return CollectedUpdates(everybody[places], factors, rows)

    def _rows_at(self, places: Ids, every: Mapping[str, Tensor], late: ArrivingUpdates) -> dict[str, Tensor]:
        """Return the rows at these places of this round's rows followed by the late ones."""
        where = torch.from_numpy(places).to(self._world.device)
        found = {name: every.get(name, like.new_empty(0, len(like))) for name, like in self._like.items()}
        if late.rows is not None:
            then = sums.split(late.rows, {name: len(like) for name, like in self._like.items()})
            found = {name: torch.cat([value, then[name]]) for name, value in found.items()}
        return {name: value[where] for name, value in found.items()}

    def _weights(self, task: ClientTask, name: str, collected: CollectedUpdates) -> Tensor:
        """Return the weight of each client (clients,), bounded by MAX_WEIGHT_RATIO."""
        samples = self._samples[collected.clients].astype(np.float64)
        samples = np.minimum(samples, MAX_WEIGHT_RATIO * np.median(samples))
        weights = collected.factors * (samples if task.weights_of(name) == SAMPLES else 1.0)
        return torch.from_numpy(weights).to(self._world.device)

    def _apply_rule(
        self, task: ClientTask, rows: Mapping[str, Tensor], weights: Mapping[str, Tensor], round_: int
    ) -> tuple[dict[str, Tensor], list[int]]:
        """Return the combined vector of each name, and the places of the clients that were left out."""
        trusted = {} if self._trusted_update is None else self._trusted_update.compute(self._server, task, round_)
        update, rejected = self._apply(rows[UPDATE], weights[UPDATE], trusted.get(UPDATE))
        found = {UPDATE: update}
        if STATISTICS in rows:
            found[STATISTICS], far = self._statistics(rows[STATISTICS], weights[STATISTICS], trusted.get(STATISTICS))
            everybody = set(rejected) | set(far)
            rejected = list(everybody) if len(everybody) < len(rows[UPDATE]) else rejected
        return found, sorted(rejected)

    def _apply(self, rows: Tensor, weights: Tensor, trusted: Tensor | None) -> tuple[Tensor, Sequence[int]]:
        extra = () if trusted is None else (trusted,)
        return self._aggregation.combine(rows, weights, *extra, **self._options)

    def _statistics(self, rows: Tensor, weights: Tensor, trusted: Tensor | None) -> tuple[Tensor, list[int]]:
        """Return the next running statistics, and the places of clients whose own were left out as far away.

        Where the rule finds none to trust, the server's stay as they are: without new ones the round is still good.
        """
        current = self._server.statistics
        changes = rows - current
        lengths = norms(changes)  # first: a rule may write into its rows
        try:
            change, rejected = self._apply(changes, weights, None if trusted is None else trusted - current)
        except TooFewUpdates:
            change, rejected = torch.zeros_like(current, dtype=torch.float64), ()
        is_far = lengths > FAR_RATIO * lengths.quantile(0.5)
        found = current.double() + change
        # A rule that only bounds lengths may still lead a variance below zero, which has no root.
        found[self._variances] = found[self._variances].clamp(min=0)
        return found, [place for place in rejected if bool(is_far[place])]

    def _broadcast(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rank 0's vectors on every rank."""
        local = {name: value[None] for name, value in made.items()}
        like = {name: value.double() for name, value in self._like.items()}
        found = self._exchange.gather_rows(local, [1] + [0] * (self._world.size - 1), like)
        return {name: value[0] for name, value in found.items()}


def _variances(layout: Layout) -> Tensor:
    """Return which running statistics (statistics,) are variances of layers that normalise over a batch."""
    parts = [torch.full((shape.numel(),), name.endswith("running_var")) for name, shape in layout.shapes.items()]
    return torch.cat([torch.zeros(0, dtype=torch.bool), *parts])


def _combined(made: dict[str, Tensor], weights: Mapping[str, Tensor], left_out: Ids) -> CombinedUpdates:
    return CombinedUpdates(made, {name: value * weights[name].sum() for name, value in made.items()}, left_out)


def _zeroed(weights: Mapping[str, Tensor], left_out: Sequence[int]) -> dict[str, Tensor]:
    """Return copies of the weights with zeros for the rejected clients."""
    found = {name: value.clone() for name, value in weights.items()}
    for value in found.values():
        value[list(left_out)] = 0
    return found
