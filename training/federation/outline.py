"""Who would have how much, before anything runs: some clients one by one, of all of them a summary. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.federation import tables
from training.federation.data_division import Divided
from training.federation.tables import QUANTILES

NAMED = 1000
"""Clients that are told of one by one; the others are summed."""


@dataclass(frozen=True, eq=False)
class Outline:
    """How a division's training samples lie."""

    labels: tuple[str, ...]
    counts: NDArray[np.int64]
    """(clients, labels)."""
    names: tuple[str, ...]
    """By client; empty: they have none."""

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.counts.sum(axis=1)
        return found

    @cached_property
    def commonest(self) -> NDArray[np.int64]:
        """By client the label that it has most of."""
        found: NDArray[np.int64] = self.counts.argmax(axis=1)
        return found

    @cached_property
    def commonest_shares(self) -> NDArray[np.float64]:
        """The part of each client's samples that is of that label."""
        found: NDArray[np.float64] = self.counts.max(axis=1) / np.maximum(self.sizes, 1)
        return found

    @cached_property
    def spreads(self) -> dict[str, dict[str, float]]:
        """Of samples, of labels that a client has at all, and of the share of its commonest: the distribution."""
        found = {
            "samples": self.sizes,
            "labels": (self.counts > 0).sum(axis=1),
            "commonest_share": self.commonest_shares,
        }
        places = list(QUANTILES.values())
        return {
            what: dict(zip(QUANTILES, np.quantile(values, places).tolist(), strict=True))
            for what, values in found.items()
        }

    def name(self, client: int) -> str:
        return self.names[client] if self.names else ""

    def told(self) -> dict[str, Any]:
        """As data: of at most NAMED clients each, of the others their sums."""
        counts, rest = self.counts[:NAMED].tolist(), self.counts[NAMED:]
        sizes = self.sizes[:NAMED].tolist()
        return {
            "clients": len(self.counts),
            "samples": int(self.sizes.sum()),
            "labels": list(self.labels),
            "spreads": self.spreads,
            "items": [
                {"number": number, "name": self.name(number), "samples": size, "split": split}
                for number, (size, split) in enumerate(zip(sizes, counts, strict=True))
            ],
            "rest": {"clients": len(rest), "samples": int(rest.sum()), "split": rest.sum(axis=0).tolist()}
            if len(rest)
            else None,
        }


def outline(divided: Divided) -> Outline:
    """Of no more labels than a picture tells apart."""
    counts, labels = tables.few(divided.counts(), divided.labels.names)
    return Outline(labels, counts, divided.names)
