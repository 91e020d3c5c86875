"""Aggregations that are no sum: every update is brought to every rank, and one of them makes one of all.

That takes a model's size a client on each rank, where a sum takes a few; the price of looking at each by itself. Rank 0
alone computes, and tells the others: ranks whose processors round differently would otherwise choose different clients
once in a while, and go on with different models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training import contracts
from training.contracts import Aggregation
from training.federated import sums
from training.federated.aggregation._robust import TooFew
from training.federated.assembling import Federation
from training.federated.rooting import Root
from training.federated.schedule import Ids
from training.federated.server import SAMPLES
from training.federated.transport.ranks import Ranks
from training.federated.working import Sent
from training.runtime.distributed import World

COMBINED = "delta"
"""What of that which clients send is combined; what is sent beside it, running statistics, is added up."""


@dataclass(frozen=True)
class Combined:
    """What a round's updates have become, the same on every rank."""

    mean: dict[str, Tensor]
    """(numbers,) float64 by name; of COMBINED what the aggregation made of it."""
    total: dict[str, Tensor]
    left_out: NDArray[np.bool_]
    """By client, as they were handed in."""


@dataclass(frozen=True)
class Handed:
    """What the clients of all ranks have sent, in order of their numbers, without those that don't count."""

    rows: Mapping[str, Tensor]
    """(clients, numbers) by name."""
    weights: Mapping[str, Tensor]
    """(clients,) float64 by name."""


def combining(federation: Federation, exchange: Ranks, world: World) -> Combining | None:
    """None: the aggregation is a sum."""
    aggregation = contracts.aggregation(federation.config.aggregation)
    return None if aggregation.IS_SUM else Combining(federation, aggregation, exchange, world)


class Combining:
    """Brings the clients' updates together, and makes one of them. Every rank calls the same."""

    def __init__(self, federation: Federation, aggregation: Aggregation, exchange: Ranks, world: World) -> None:
        config, work = federation.config, federation.work
        self._server, self._samples = federation.server, federation.divided.sizes
        self._aggregation, self._options = aggregation, config.options_of(config.aggregation)
        self._exchange, self._world = exchange, world
        dtype = federation.model.dtype
        self._like = {name: torch.empty(size, dtype=dtype, device=world.device) for name, size in work.sizes.items()}
        """By name what a client sends."""
        self._root = Root(federation) if aggregation.TRUSTED and world.leads else None

    def rows(self, done: Sent) -> dict[str, Tensor]:
        """What a chunk's clients have sent, (clients, numbers) by name; zeros where all of them failed."""
        many = len(done.clients)
        return {name: done.values.get(name, like.new_zeros(many, len(like))) for name, like in self._like.items()}

    def combine(
        self, mine: Sequence[Mapping[str, Tensor]], shares: Sequence[int], counts: Mapping[int, bool], *, round_: int
    ) -> Combined | str:
        """`mine`: of this rank's chunks; `shares`: how many clients each rank has had; `counts`: by client, rank after
        rank, whether its update is one. A string says why nothing can be made of them."""
        own = {name: torch.cat([rows[name] for rows in mine]) for name in self._like} if mine else {}
        every = self._exchange.rows(own, shares, self._like)
        clients, is_good = np.array(list(counts), dtype=np.int64), np.array(list(counts.values()), dtype=bool)
        order = np.argsort(clients)
        places = order[is_good[order]]
        if not len(places):
            return "nobody has sent an update"
        weights = {name: self._weights(name, clients[places]) for name in self._like}
        made: dict[str, Tensor] = {}
        told: list[int] | str = []
        if self._world.leads:
            handed = Handed({name: rows[torch.from_numpy(places)] for name, rows in every.items()}, weights)
            try:
                made, told = self._made(handed, round_)
            except TooFew as few:
                told = str(few)
        del every
        told = self._exchange.facts(told)[0]
        if isinstance(told, str):
            return told
        made = self._from_first(made)
        left_out = np.zeros(len(clients), dtype=bool)
        left_out[places[told]] = True
        return _combined(made, _without(weights, told), left_out)

    def _weights(self, name: str, clients: Ids) -> Tensor:
        """(clients,)"""
        by_samples = self._server.weighted_by(name) == SAMPLES
        each = self._samples[clients] if by_samples else np.ones(len(clients))
        return torch.from_numpy(each).double().to(self._world.device)

    def _made(self, handed: Handed, round_: int) -> tuple[dict[str, Tensor], list[int]]:
        """The combined row and the sums of what else was sent, by name; and the places of those left out."""
        trusted = () if self._root is None else (self._root.update(self._server, round_),)
        rows, weights = handed.rows[COMBINED], handed.weights[COMBINED]
        combined, left_out = self._aggregation.combine(rows, weights, *trusted, **self._options)
        left = _without(handed.weights, left_out)
        made = {name: _sum(rows, left[name]) for name, rows in handed.rows.items() if name != COMBINED}
        return {COMBINED: combined, **made}, sorted(left_out)

    def _from_first(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What rank 0 has made, on every rank."""
        mine = {name: value[None] for name, value in made.items()}
        like = {name: value.double() for name, value in self._like.items()}
        found = self._exchange.rows(mine, [1] + [0] * (self._world.size - 1), like)
        return {name: value[0] for name, value in found.items()}


def _combined(made: Mapping[str, Tensor], weights: Mapping[str, Tensor], left_out: NDArray[np.bool_]) -> Combined:
    mean, total = {}, {}
    for name, value in made.items():
        weight = weights[name].sum()
        mean[name] = value if name == COMBINED else value / weight
        total[name] = value * weight if name == COMBINED else value
    return Combined(mean, total, left_out)


def _without(weights: Mapping[str, Tensor], left_out: Sequence[int]) -> dict[str, Tensor]:
    """Nothing for those that are left out."""
    found = {name: value.clone() for name, value in weights.items()}
    for value in found.values():
        value[list(left_out)] = 0
    return found


def _sum(rows: Tensor, weights: Tensor) -> Tensor:
    total = sums.zeros(rows.shape[1], rows.device)
    sums.add_weighted(total, rows, weights)
    return total
