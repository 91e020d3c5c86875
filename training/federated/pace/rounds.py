"""The server waits for everybody whom it has asked."""

from __future__ import annotations

import numpy as np

from training.federation.round_plan import Plan, Scene


def schedule(scene: Scene) -> Plan:
    """Updates that a run with another pace left under way when it was resumed with this one count in the first round:
    the clients have already changed what they keep."""
    flight = np.sort(scene.flight.clients)
    clients = scene.select(scene.wanted, flight)
    return Plan(scene.round, clients, scene.full_steps(clients), arriving=flight)
