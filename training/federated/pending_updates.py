"""Updates in flight: computed from an older model and not arrived yet. Checkpoints store them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.federated import sums
from training.federated.schedule import Ids
from training.federation.round_plan import RoundPlan, UpdatesInFlight


@dataclass(frozen=True)
class ArrivingUpdates:
    """Late updates that count in this round."""

    clients: Ids
    rows: Tensor | None
    """(clients, size)."""
    samples: NDArray[np.float64]
    factors: NDArray[np.float64]
    """(clients,): the discount of each update for its age."""
    losses: NDArray[np.float64]

    @classmethod
    def empty(cls) -> ArrivingUpdates:
        nothing = np.zeros(0)
        return cls(np.zeros(0, dtype=np.int64), None, nothing, nothing, nothing)

    @property
    def chunks(self) -> int:
        return int(len(self.clients) > 0)

    def weighted_sum(self, sizes: Mapping[str, int], weights: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Return the weighted sum (size,) of the updates, added client after client."""
        assert self.rows is not None
        total = sums.zeros(sum(sizes.values()), device)
        rows = sums.split(self.rows, sizes)
        for name, part in sums.split(total, sizes).items():
            sums.add_weighted(part, rows[name], weights[name].to(device))
        return total


class PendingUpdates:
    """The updates in flight in the order of their clients, at most one for each client."""

    def __init__(self, samples: NDArray[np.int64], size: int, like: Tensor) -> None:
        """`samples` (clients,): training samples of all clients; `size`: of an update."""
        self._samples = samples
        self.clients: Ids = np.zeros(0, dtype=np.int64)
        self.started: Ids = np.zeros(0, dtype=np.int64)
        self.arrives: NDArray[np.float64] = np.zeros(0)
        self.losses: NDArray[np.float64] = np.zeros(0)
        self.rows = like.new_empty(0, size)

    @property
    def in_flight(self) -> UpdatesInFlight:
        return UpdatesInFlight(self.clients, self.started, self.arrives)

    def arriving(self, plan: RoundPlan) -> ArrivingUpdates:
        """Return the updates that count in this round."""
        if not len(plan.arriving):
            return ArrivingUpdates.empty()
        where = np.flatnonzero(np.isin(self.clients, plan.arriving))
        staleness = plan.round - self.started[where]
        return ArrivingUpdates(
            self.clients[where],
            self.rows[torch.from_numpy(where)],
            self._samples[self.clients[where]].astype(np.float64),
            np.power(1.0 + staleness, -plan.staleness_exponent, dtype=np.float64),
            self.losses[where],
        )

    def remove(self, clients: Ids) -> None:
        self._select(np.flatnonzero(~np.isin(self.clients, clients)))

    def add(
        self,
        clients: Ids,
        rows: Tensor,
        *,
        started: int,
        arrives: NDArray[np.float64],
        losses: NDArray[np.float64],
    ) -> None:
        everybody = np.concatenate([self.clients, clients])
        order = np.argsort(everybody, kind="stable")
        self.started = np.concatenate([self.started, np.full(len(clients), started)])[order]
        self.arrives = np.concatenate([self.arrives, arrives])[order]
        self.losses = np.concatenate([self.losses, losses])[order]
        joined = self.rows.new_empty(
            len(everybody), self.rows.shape[1]
        )  # put in order once, not joined and then sorted
        places = torch.from_numpy(np.argsort(order))
        joined[places[: len(self.clients)]] = self.rows
        joined[places[len(self.clients) :]] = rows.to(joined.dtype)
        self.clients, self.rows = everybody[order], joined

    def _select(self, where: Ids) -> None:
        self.clients, self.started = self.clients[where], self.started[where]
        self.arrives, self.losses = self.arrives[where], self.losses[where]
        self.rows = self.rows[torch.from_numpy(where)]

    # Plain values that a checkpoint stores as JSON (training.checkpoint.saved_state). The rows are among its tensors.

    def state_dict(self) -> dict[str, Any]:
        return {
            "clients": self.clients.tolist(),
            "started": self.started.tolist(),
            "arrives": self.arrives.tolist(),
            "losses": self.losses.tolist(),
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Restore the plain values, and allocate the rows, which are read afterwards."""
        self.clients = np.array(stored.get("clients") or [], dtype=np.int64)
        self.started = np.array(stored.get("started") or [], dtype=np.int64)
        self.arrives = np.array(stored.get("arrives") or [], dtype=np.float64)
        self.losses = np.array(stored.get("losses") or [], dtype=np.float64)
        self.rows = self.rows.new_empty(len(self.clients), self.rows.shape[1])
