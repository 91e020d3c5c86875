"""Forecast which clients a pace leaves out, before anything runs, by planning rounds with the simulated clock.

Selection, speeds and sizes follow from the seed, so the forecast is exact unless clients fail. Only
selection = "by_loss" depends on losses that are not known yet: there all clients count as not trained yet.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.federation import parts
from training.federation.client_selection import SelectionState, select
from training.federation.config import FederationConfig
from training.federation.round_plan import Ids, PaceContext, RoundPlan, UpdatesInFlight, steps_of

MAX_ROUNDS = 1_000
MAX_SECONDS = 0.5
"""Time limit of a forecast: enough to plan 1,000 rounds of 1,000 clients."""


@dataclass(frozen=True)
class CoverageForecast:
    """Clients that are selected in some of these rounds and count in none."""

    rounds: int
    """Number of planned rounds: all rounds of the run, or as many as the time limit allowed."""
    excluded: Ids
    """Their ids, ascending."""
    never_selected: int


def forecast(config: FederationConfig, sizes: NDArray[np.int64]) -> CoverageForecast:
    """Return whom the run leaves out. `sizes`: samples of each client."""
    is_partial = parts.algorithm(config.algorithm).ACCEPTS_PARTIAL_WORK
    everybody = np.arange(len(sizes))
    losses = np.full(len(sizes), np.nan)
    selected, counted = np.zeros(len(sizes), dtype=bool), np.zeros(len(sizes), dtype=bool)
    flight = UpdatesInFlight(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
    now, round_, until = 0.0, 0, time.monotonic() + MAX_SECONDS
    while round_ < min(config.rounds, MAX_ROUNDS) and time.monotonic() < until and not counted.all():
        round_ += 1

        def select_clients(count: int, without: Ids, round_: int = round_) -> Ids:
            eligible = np.setdiff1d(everybody, without, assume_unique=True)
            state = SelectionState(eligible=eligible, samples=sizes, losses=losses, round=round_)
            return select(config, count, state)

        plan = parts.pace(config.pace).schedule(
            PaceContext(
                seed=config.seed,
                round=round_,
                now=now,
                wanted=config.selected,
                select=select_clients,
                full_steps=lambda clients: steps_of(
                    sizes[clients], config.batch, epochs=config.epochs, local_steps=config.local_steps
                ),
                flight=flight,
                is_partial=is_partial,
            ),
            **config.options_of(config.pace),
        )
        selected[plan.clients] = selected[plan.too_slow] = True
        counted[plan.clients[plan.counts_in_round(plan.clients)]] = counted[plan.arriving] = True
        flight, now = _in_flight_after(flight, plan), plan.ends_at if plan.ends_at is not None else now
    return CoverageForecast(round_, np.flatnonzero(selected & ~counted), int((~selected).sum()))


def _in_flight_after(flight: UpdatesInFlight, plan: RoundPlan) -> UpdatesInFlight:
    """Return the updates that are still under way after the round."""
    stays = ~np.isin(flight.clients, plan.arriving)
    return UpdatesInFlight(
        np.concatenate([flight.clients[stays], plan.later]),
        np.concatenate([flight.started[stays], np.full(len(plan.later), plan.round)]),
        np.concatenate([flight.arrives[stays], plan.later_at]),
    )
