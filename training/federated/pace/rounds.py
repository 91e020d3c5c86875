"""The server waits for all selected clients."""

from __future__ import annotations

import numpy as np

from training.federation.round_plan import PaceContext, RoundPlan


def schedule(context: PaceContext) -> RoundPlan:
    """Plan a round with all selected clients.

    Updates in flight, in a run that was resumed from another pace, count in its first round: their clients have already
    changed their state.
    """
    flight = np.sort(context.flight.clients)
    clients = context.select(context.wanted, flight)
    return RoundPlan(context.round, clients, context.full_steps(clients), arriving=flight)
