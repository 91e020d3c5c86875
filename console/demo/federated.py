"""Generate the reports of a federation that never ran: rounds, client states, and how the data are split."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from console.demo.reports import Incarnation
from portal.series.codec import Floats
from training.federation import tables
from training.federation.tables import STATES

VALIDATED = 5
"""Rounds between two validations."""
VALIDATION_SHARE = 0.05  # of each client's text: the default of recipe language
UPDATE_MIB = 0.172  # of the model's numbers, in fp32
TRAINED, LATE, DROPPED, REJECTED = range(4)
TRACEBACK = """Traceback (most recent call last):
  File "training/federated/client_work.py", line 171, in _client
    batch = self._supply.batch(client, step)
OSError: [Errno 116] Stale file handle: '/data/packages/wsgiref'"""
QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}


class FederatedIncarnation(Incarnation):
    """An incarnation whose steps are rounds, reported by rank 0 alone."""

    def values(self, world: int) -> dict[str, list[Floats]]:
        story, states, losses, seconds = self.story, self._states(), self._losses(), self._seconds()
        counted = np.isin(states, (TRAINED, LATE))
        valid_losses = np.where(counted, losses, np.nan)
        longest = np.where(states == TRAINED, seconds, 0).max(axis=1)
        compute, transfer = 0.55 * longest, 0.08 * longest
        columns = {
            "loss": np.nanmean(valid_losses, axis=1), "step_seconds": longest, "round_seconds": longest,
            "compute_seconds": compute, "transfer_seconds": transfer, "wait_seconds": longest - compute - transfer,
            "mib_up": UPDATE_MIB * (states != DROPPED).sum(axis=1),
            "mib_down": np.full(len(states), UPDATE_MIB * len(story.owners)),
            **{STATES[state]: (states == state).sum(axis=1) for state in (TRAINED, LATE, DROPPED, REJECTED)},
            **{f"client_loss_{name}": np.nanquantile(valid_losses, part, axis=1) for name, part in QUANTILES.items()},
        }  # fmt: skip
        return {name: [column.astype(np.float64)] for name, column in columns.items()}

    def data_events(self) -> list[dict[str, Any]]:
        owners = self.story.owners
        names = tuple(owner.name for owner in owners)
        samples = np.array([owner.samples for owner in owners])
        evaluated = np.rint(samples * VALIDATION_SHARE / (1 - VALIDATION_SHARE)).astype(np.int64)
        splits = tables.split_events(np.diag(samples), names, evaluated)
        return [
            *({**self.event("clients.split"), **part.pack()} for part in splits),
            *({**self.event("clients.named"), **part.pack()} for part in tables.name_events(names)),
        ]

    def step_events(self, low: int, high: int, batch: int, time: float) -> list[dict[str, Any]]:
        span = slice(low - self.first, high - self.first)
        states, losses, seconds = self._states()[span], self._losses()[span], self._seconds()[span]
        numbers, clients = np.arange(low + 1, high + 1), np.arange(len(self.story.owners))
        state_counts = {STATES[state]: (states == state).sum(axis=1) for state in range(len(STATES))}
        table = tables.RoundTable(
            rounds={
                "round": numbers, **state_counts, "seconds": np.where(states == TRAINED, seconds, 0).max(axis=1),
                "bytes_up": (UPDATE_MIB * 2**20 * (states != DROPPED).sum(axis=1)).astype(np.uint64),
                "bytes_down": np.full(len(numbers), int(UPDATE_MIB * 2**20 * len(clients))),
                "loss": np.where(states == DROPPED, 0, losses).sum(axis=1) / (states != DROPPED).sum(axis=1),
                "accuracy": np.full(len(numbers), math.nan), "worst": np.full(len(numbers), -1),
            },
            clients={
                "round": np.repeat(numbers, len(clients)), "client": np.tile(clients, len(numbers)),
                "state": states.ravel(), "loss": np.where(states == DROPPED, np.nan, losses).ravel(),
                "accuracy": np.full(states.size, math.nan), "seconds": seconds.ravel(),
            },
        )  # fmt: skip
        events = [self.event("round.clients", batch=batch, time=time, step=high, **table.pack())]
        for row, client in np.argwhere(states == DROPPED)[:1].tolist():
            name = self.story.owners[client].name
            dropped = {"step": int(numbers[row]), "client": client, "name": name, "traceback": TRACEBACK}
            events.append(self.event("client.dropped", batch=batch, time=time, **dropped))
        return events

    def validate(self, series: dict[str, dict[str, list[Any]]], cuts: list[tuple[int, int]]) -> None:
        rounds = [
            (batch, number) for batch, (low, high) in enumerate(cuts) for number in range(low + 1, high + 1)
            if number % VALIDATED == 0
        ]  # fmt: skip
        if rounds:
            runs = [
                [0, batch, sum(validated_batch == batch for validated_batch, _ in rounds)]
                for batch in sorted({validated_batch for validated_batch, _ in rounds})
            ]
            losses = self._losses().mean(axis=1) * 1.02
            values = [float(losses[number - self.first - 1]) for _, number in rounds]
            series["validation_loss"] = {"runs": runs, "step": [number for _, number in rounds], "value": values}

    def sample(self, series: dict[str, dict[str, list[Any]]], cuts: list[tuple[int, int]]) -> None:
        """Add nothing: rounds are not sampled."""

    def _chance(self, what: str) -> np.random.Generator:
        return np.random.default_rng([*self.story.name.encode(), *what.encode()])

    def _incarnation_rounds(self, drawn: NDArray[Any]) -> NDArray[Any]:
        """Return this incarnation's rounds out of the whole job's, so that a repeated round has the same values."""
        return drawn[self.first : self.last]

    def _states(self) -> NDArray[np.int64]:
        """(rounds, clients)."""
        owners, rounds = self.story.owners, np.arange(1, self.story.steps + 1)[:, None]
        chance = self._chance("states").random((self.story.steps, len(owners)))
        late, dropped = (np.array([getattr(owner, what) for owner in owners]) for what in ("late", "dropped"))
        since = np.array([owner.rejected_from or self.story.steps for owner in owners])
        states = np.where(chance < late, LATE, np.where(chance > 1 - dropped - 0.004, DROPPED, TRAINED))
        return self._incarnation_rounds(np.where((rounds > since) & (chance < 0.8), REJECTED, states))

    def _losses(self) -> Floats:
        story, rounds = self.story, np.arange(1, self.story.steps + 1)[:, None]
        chance = self._chance("losses")
        trend = story.floor + (story.start - story.floor) * (1 + rounds / 9) ** -0.7
        client_offset = chance.normal(1, 0.07, len(story.owners))
        losses = trend * client_offset * chance.normal(1, 0.012, (story.steps, len(client_offset)))
        since = np.array([owner.rejected_from or story.steps for owner in story.owners])
        return self._incarnation_rounds(losses * np.where(rounds > since, 1.35, 1.0))

    def _seconds(self) -> Floats:
        slow = np.array([owner.slow for owner in self.story.owners])
        drawn = self._chance("seconds").lognormal(0, 0.12, (self.story.steps, len(slow)))
        return self._incarnation_rounds(0.5 * self.story.step_s * slow * drawn)
