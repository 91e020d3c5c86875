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
    since = share_since_available(context.seed, len(context.samples), context.round, period)[context.eligible]
    available = context.eligible[since < on_share]
    if not len(available):
        available = context.eligible[np.argsort(-since, kind="stable")[: context.attempt]]
    return np.sort(context.rng.permutation(available)[: context.count])


def check(config: FederationConfig) -> Iterator[Misfit]:
    available = max(1, math.floor(config.clients * float(config.options_of("availability")["on_share"] or 1)))
    if config.selected > available:
        value = "left out, all" if config.per_round is None else f"{config.selected:,}"
        yield Misfit(
            "per_round",
            f"is {value} of {config.clients:,} clients, but about {available:,} are available at a time. "
            f"Write {available}.",
        )


def share_since_available(seed: int, clients: int, round_: int, period: int) -> NDArray[np.float64]:
    """Return the share of a period, from 0 to 1, that has passed since each client became available, (clients,)."""
    comes = np.random.RandomState(derive_seed(seed, random_streams.HOURS) % 2**32).random_sample(clients)
    return np.mod((round_ - 1) / period - comes, 1.0)
