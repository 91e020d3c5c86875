"""Whoever is there: each client comes and goes, at times of its own, as phones are charged at night."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from training.config.shape import Misfit
from training.federation import random_streams
from training.runtime.seeds import derive_seed

if TYPE_CHECKING:
    from training.federation.client_selection import Asked
    from training.federation.config import FederationConfig


def select(
    asked: Asked,
    *,
    period: Annotated[int, "1..1000000", "Rounds from one coming to the next: a day."] = 24,
    on_share: Annotated[float, "0.001..1", "The part of it for which a client is there."] = 0.5,
) -> NDArray[np.int64]:
    """At most so many of those that are there; if nobody is, the server waits for whoever comes next.

    If that one's round is lost, for the next two, so that nobody alone can end the run.
    """
    since = since_coming(asked.seed, len(asked.samples), asked.round, period)[asked.eligible]
    there = asked.eligible[since < on_share]
    if not len(there):
        there = asked.eligible[np.argsort(-since, kind="stable")[: asked.attempt]]
    return np.sort(asked.draw.permutation(there)[: asked.count])


def check(config: FederationConfig) -> Iterator[Misfit]:
    there = max(1, math.floor(config.clients * float(config.options_of("availability")["on_share"] or 1)))
    if config.selected > there:
        says = "left out, all" if config.per_round is None else f"{config.selected:,}"
        yield Misfit(
            "per_round",
            f"is {says} of {config.clients:,} clients, but about {there:,} are there at a time. Write {there}.",
        )


def since_coming(seed: int, clients: int, round_: int, period: int) -> NDArray[np.float64]:
    """(clients,): the part of a period, from 0 to 1, that has passed since each has come."""
    comes = np.random.RandomState(derive_seed(seed, random_streams.HOURS) % 2**32).random_sample(clients)
    return np.mod((round_ - 1) / period - comes, 1.0)
