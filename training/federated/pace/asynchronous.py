"""Clients train without waiting, and each few updates that arrive make a new model (Xie et al., 2019).

arXiv 1903.03934 takes updates one by one; with a buffer it is Nguyen et al., 2021, arXiv 2106.06639.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import numpy as np

from training.config.shape import Misfit
from training.federation.config import FederationConfig
from training.federation.round_plan import PaceContext, RoundPlan


def schedule(
    context: PaceContext,
    *,
    buffer: Annotated[int, "1..100000", "Number of updates that make a new model."] = 1,
    staleness_exponent: Annotated[float, "0..10", "Weight (1 + τ)^-exponent of an update that is τ models old."] = 0.5,
) -> RoundPlan:
    """Keep `wanted` clients in flight; the round ends with the arrival that fills the buffer."""
    flight = context.flight
    clients = context.select(context.wanted - len(flight.clients), flight.clients)
    takes = context.seconds(clients)
    everybody = np.concatenate([flight.clients, clients])
    at = np.concatenate([flight.arrives, context.now + takes])
    order = np.lexsort((everybody, at))[:buffer]
    ends = float(at[order].max(initial=context.now))
    counted = np.sort(everybody[order])
    later = ~np.isin(clients, counted)
    return RoundPlan(
        context.round,
        clients,
        context.full_steps(clients),
        later=clients[later],
        later_at=context.now + takes[later],
        arriving=np.intersect1d(flight.clients, counted),
        staleness_exponent=staleness_exponent,
        ends_at=ends,
        seconds=dict(zip(everybody.tolist(), (at - context.now).tolist(), strict=True)),
        quorum=1,
    )


def check(config: FederationConfig) -> Iterator[Misfit]:
    buffer = config.options_of("asynchronous")["buffer"]
    if isinstance(buffer, int) and buffer > config.selected:
        message = f"waits for {buffer} updates, but {config.selected} clients are in flight. Write at most that."
        yield Misfit("asynchronous.buffer", message)
