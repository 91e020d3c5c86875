"""Forecast whom a pace leaves out, before anything runs, from the plans that the simulated clock makes.

Selection, speeds and sizes follow from the seed, so the forecast is exact unless clients fail. Only
selection = "by_loss" depends on losses that are not known yet; clients count there as not trained yet.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.federation import parts
from training.federation.client_selection import select
from training.federation.config import FederationConfig
from training.federation.round_plan import Flight, Ids, Plan, Scene, steps_of

MOST_ROUNDS = 1_000
MOST_SECONDS = 0.5
"""Time limit of a forecast: enough to plan 1,000 rounds of 1,000 clients."""


@dataclass(frozen=True)
class Forecast:
    """Clients that are selected in some of these rounds and count in none."""

    rounds: int
    """Rounds that were planned: all of the run, or as many as there was time for."""
    excluded: Ids
    """Ascending."""
    never_asked: int


def forecast(config: FederationConfig, sizes: NDArray[np.int64]) -> Forecast:
    """Return whom the run leaves out. `sizes`: samples of each client."""
    is_partial = parts.algorithm(config.algorithm).PARTIAL
    everybody = np.arange(len(sizes))
    losses = np.full(len(sizes), np.nan)
    asked, counted = np.zeros(len(sizes), dtype=bool), np.zeros(len(sizes), dtype=bool)
    flight = Flight(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
    now, round_, until = 0.0, 0, time.monotonic() + MOST_SECONDS
    while round_ < min(config.rounds, MOST_ROUNDS) and time.monotonic() < until and not counted.all():
        round_ += 1

        def chosen(count: int, without: Ids, round_: int = round_) -> Ids:
            eligible = np.setdiff1d(everybody, without, assume_unique=True)
            return select(config, count, eligible=eligible, samples=sizes, losses=losses, round_=round_)

        plan = parts.pace(config.pace).schedule(
            Scene(
                seed=config.seed,
                round=round_,
                now=now,
                wanted=config.selected,
                select=chosen,
                full_steps=lambda clients: steps_of(
                    sizes[clients], config.batch, epochs=config.epochs, local_steps=config.local_steps
                ),
                flight=flight,
                is_partial=is_partial,
            ),
            **config.options_of(config.pace),
        )
        asked[plan.clients] = asked[plan.too_slow] = True
        counted[plan.clients[plan.is_now(plan.clients)]] = counted[plan.arriving] = True
        flight, now = _flown(flight, plan), plan.ends if plan.ends is not None else now
    return Forecast(round_, np.flatnonzero(asked & ~counted), int((~asked).sum()))


def _flown(flight: Flight, plan: Plan) -> Flight:
    """Return the updates that are still under way after the round."""
    stays = ~np.isin(flight.clients, plan.arriving)
    return Flight(
        np.concatenate([flight.clients[stays], plan.later]),
        np.concatenate([flight.started[stays], np.full(len(plan.later), plan.round)]),
        np.concatenate([flight.arrives[stays], plan.later_at]),
    )
