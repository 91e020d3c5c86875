"""The server waits for all selected clients."""

from __future__ import annotations

import numpy as np

from training.federation.round_plan import PaceContext, RoundPlan


def schedule(scene: PaceContext) -> RoundPlan:
    """Plan a round with all selected clients.

    Updates in flight, in a run that was resumed from another pace, count in its first round: their clients have already
    changed their state.
    """
    flight = np.sort(scene.flight.clients)
    clients = scene.select(scene.wanted, flight)
    return RoundPlan(scene.round, clients, scene.full_steps(clients), arriving=flight)
