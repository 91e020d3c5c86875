"""Aggregations that are no sum: every update is brought to every rank, and one of them makes one of all.

Every vector that leaves a client passes through the rule: the update, and the running statistics as their difference to
the server's. Each passes by itself, as their scales have nothing in common: joined into one vector, the larger would
hide an attack on the smaller. Bringing them together takes a model's size a client on each rank, where a sum takes a
few; the price of looking at each by itself. Rank 0 alone computes, and tells the others: ranks whose processors round
differently would otherwise choose different clients once in a while, and go on with different models.
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
from training.federated.client_tasks import SAMPLES, Question
from training.federated.layout import Layout
from training.federated.model import STATISTICS
from training.federated.pending_updates import Arrivals
from training.federated.schedule import Ids
from training.federated.transport.ranks import Ranks
from training.federated.trusted_update import Root
from training.federation.filter_order import UPDATE
from training.federation.parts import TooFew
from training.runtime.distributed import World, from_first

HEAVIEST = 3.0
"""A client weighs at most as much as so many clients with the round's median number of samples. How many samples it has
is its own word; unbounded, one lie would outweigh all others in rules that weigh by samples."""
FAR = 10.0
"""Running statistics that were left out are a reason to report their client as rejected where they lie so many times
farther from the server's than the median client's. Krum and its kin always leave some honest ones out."""


@dataclass(frozen=True)
class Combined:
    """What a round's updates have become, the same on every rank."""

    mean: dict[str, Tensor]
    """(numbers,) float64 by name: what the aggregation made of it."""
    sum: dict[str, Tensor]
    left_out: Ids
    """Clients, ascending."""


@dataclass(frozen=True)
class Handed:
    """Updates that count, in order of their clients' numbers."""

    clients: Ids
    factors: NDArray[np.float64]
    """By which a late one weighs less."""
    rows: Mapping[str, Tensor]
    """(clients, numbers) by name. On rank 0; elsewhere nothing."""


def combining(federation: Federation, exchange: Ranks, world: World) -> Combining | None:
    """None: the aggregation is a sum."""
    return None if federation.aggregation.IS_SUM else Combining(federation, exchange, world)


class Combining:
    """Brings the clients' updates together, and makes one of them. Every rank calls the same."""

    def __init__(self, federation: Federation, exchange: Ranks, world: World) -> None:
        config, work, server = federation.config, federation.work, federation.server
        self._server, self._samples = server, federation.divided.sizes
        aggregation = federation.aggregation
        self._aggregation, self._options = aggregation, config.options_of(config.aggregation)
        self._exchange, self._world = exchange, world
        sizes = work.sizes_of(work.training, server)
        self._like = {name: server.weights.new_empty(size) for name, size in sizes.items()}
        """By name what a client sends."""
        self._variances = _variances(federation.model.statistics).to(world.device)
        self._root = Root(federation) if aggregation.TRUSTED and world.leads else None

    def rows(self, clients: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a chunk's clients have sent, (clients, numbers) by name; zeros where all of them failed."""
        return {name: values.get(name, like.new_zeros(clients, len(like))) for name, like in self._like.items()}

    def combine(
        self,
        question: Question,
        mine: Sequence[Mapping[str, Tensor]],
        each: Sequence[int],
        *,
        clients: Ids,
        counts: NDArray[np.bool_],
        late: Arrivals,
        round_: int,
    ) -> Combined | str:
        """`mine`: `rows` of this rank's chunks; `each`: how many clients every rank has had; `clients` and `counts`: of
        all of them, rank after rank, the numbers and whose update counts. Those that are `late` count with them. A
        string says why nothing can be made of it."""
        handed = self._handed(mine, each, clients, counts, late)
        if not len(handed.clients):
            return "no client has sent an update"
        weights = {name: self._weights(question, name, handed) for name in self._like}
        made: dict[str, Tensor] = {}

        def left_out() -> list[int] | str:
            try:
                vectors, places = self._made(question, handed.rows, weights, round_)
            except TooFew as few:
                return str(few)
            made.update(vectors)
            return places

        told = from_first(self._world, left_out)
        if isinstance(told, str):
            return told
        return _combined(self._from_first(made), _without(weights, told), handed.clients[told])

    def _handed(
        self,
        mine: Sequence[Mapping[str, Tensor]],
        each: Sequence[int],
        clients: Ids,
        counts: NDArray[np.bool_],
        late: Arrivals,
    ) -> Handed:
        everybody = np.concatenate([clients, late.clients])
        order = np.argsort(everybody, kind="stable")
        places = order[np.concatenate([counts, np.ones(len(late.clients), dtype=bool)])[order]]
        factors = np.concatenate([np.ones(len(clients)), late.factors])[places]
        own = {name: torch.cat([part[name] for part in mine]) for name in self._like} if mine else {}
        every = self._exchange.rows(own, each, self._like)
        rows = self._rows_at(places, every, late) if self._world.leads else {}
        return Handed(everybody[places], factors, rows)

    def _rows_at(self, places: Ids, every: Mapping[str, Tensor], late: Arrivals) -> dict[str, Tensor]:
        """Of those of this round, with the late ones after them."""
        where = torch.from_numpy(places).to(self._world.device)
        found = {name: every.get(name, like.new_empty(0, len(like))) for name, like in self._like.items()}
        if late.rows is not None:
            then = sums.split(late.rows, {name: len(like) for name, like in self._like.items()})
            found = {name: torch.cat([value, then[name]]) for name, value in found.items()}
        return {name: value[where] for name, value in found.items()}

    def _weights(self, question: Question, name: str, handed: Handed) -> Tensor:
        """Return the weight of each client (clients,), bounded by HEAVIEST."""
        samples = self._samples[handed.clients].astype(np.float64)
        samples = np.minimum(samples, HEAVIEST * np.median(samples))
        weights = handed.factors * (samples if question.weighted_by(name) == SAMPLES else 1.0)
        return torch.from_numpy(weights).to(self._world.device)

    def _made(
        self, question: Question, rows: Mapping[str, Tensor], weights: Mapping[str, Tensor], round_: int
    ) -> tuple[dict[str, Tensor], list[int]]:
        """Return the combined vector of each name, and the places of the clients that were left out."""
        trusted = {} if self._root is None else self._root.update(self._server, question, round_)
        made, out = self._apply(rows[UPDATE], weights[UPDATE], trusted.get(UPDATE))
        found = {UPDATE: made}
        if STATISTICS in rows:
            found[STATISTICS], far = self._statistics(rows[STATISTICS], weights[STATISTICS], trusted.get(STATISTICS))
            everybody = set(out) | set(far)
            out = list(everybody) if len(everybody) < len(rows[UPDATE]) else out
        return found, sorted(out)

    def _apply(self, rows: Tensor, weights: Tensor, trusted: Tensor | None) -> tuple[Tensor, Sequence[int]]:
        extra = () if trusted is None else (trusted,)
        return self._aggregation.combine(rows, weights, *extra, **self._options)

    def _statistics(self, rows: Tensor, weights: Tensor, trusted: Tensor | None) -> tuple[Tensor, list[int]]:
        """Return the next running statistics, and the places of clients whose own were left out as far away.

        Where the rule finds none to trust, the server's stay as they are: without new ones the round is still good.
        """
        own = self._server.statistics
        changes = rows - own
        lengths = norms(changes)  # first: a rule may write into its rows
        try:
            change, out = self._apply(changes, weights, None if trusted is None else trusted - own)
        except TooFew:
            change, out = torch.zeros_like(own, dtype=torch.float64), ()
        is_far = lengths > FAR * lengths.quantile(0.5)
        found = own.double() + change
        # A rule that only bounds lengths may still lead a variance below zero, which has no root.
        found[self._variances] = found[self._variances].clamp(min=0)
        return found, [place for place in out if bool(is_far[place])]

    def _from_first(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What rank 0 has made, on every rank."""
        mine = {name: value[None] for name, value in made.items()}
        like = {name: value.double() for name, value in self._like.items()}
        found = self._exchange.rows(mine, [1] + [0] * (self._world.size - 1), like)
        return {name: value[0] for name, value in found.items()}


def _variances(layout: Layout) -> Tensor:
    """Return which running statistics (numbers,) are variances of layers that normalise over a batch."""
    parts = [torch.full((shape.numel(),), name.endswith("running_var")) for name, shape in layout.shapes.items()]
    return torch.cat([torch.zeros(0, dtype=torch.bool), *parts])


def _combined(made: dict[str, Tensor], weights: Mapping[str, Tensor], left_out: Ids) -> Combined:
    return Combined(made, {name: value * weights[name].sum() for name, value in made.items()}, left_out)


def _without(weights: Mapping[str, Tensor], left_out: Sequence[int]) -> dict[str, Tensor]:
    """Nothing for those that are left out."""
    found = {name: value.clone() for name, value in weights.items()}
    for value in found.values():
        value[list(left_out)] = 0
    return found
