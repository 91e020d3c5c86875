"""Select among available clients: each follows its own daily times, like phones that charge at night."""

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
    from training.federation.client_selection import SelectionContext
    from training.federation.config import FederationConfig


def select(
    context: SelectionContext,
    *,
    period: Annotated[int, "1..1000000", "Rounds after which a client becomes available again: a day."] = 24,
    on_share: Annotated[float, "0.001..1", "Share of the period in which a client is available."] = 0.5,
) -> NDArray[np.int64]:
    """Select among the available clients; if there are none, wait for the next one.

    If that round is lost, wait for the next two, so that no single client can end the run.
    """
    since = since_coming(context.seed, len(context.samples), context.round, period)[context.eligible]
    there = context.eligible[since < on_share]
    if not len(there):
        there = context.eligible[np.argsort(-since, kind="stable")[: context.attempt]]
    return np.sort(context.draw.permutation(there)[: context.count])


def check(config: FederationConfig) -> Iterator[Misfit]:
    there = max(1, math.floor(config.clients * float(config.options_of("availability")["on_share"] or 1)))
    if config.selected > there:
        value = "left out, all" if config.per_round is None else f"{config.selected:,}"
        yield Misfit(
            "per_round",
            f"is {value} of {config.clients:,} clients, but about {there:,} are available at a time. Write {there}.",
        )


def since_coming(seed: int, clients: int, round_: int, period: int) -> NDArray[np.float64]:
    """Return the share of a period, from 0 to 1, that has passed since each client became available, (clients,)."""
    comes = np.random.RandomState(derive_seed(seed, random_streams.HOURS) % 2**32).random_sample(clients)
    return np.mod((round_ - 1) / period - comes, 1.0)
