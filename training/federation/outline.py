"""Outline how a split would divide the data, before anything runs: a summary, and the first clients. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.federation import tables
from training.federation.data_division import DataDivision
from training.federation.tables import QUANTILES

NAMED = 1000
"""Clients that are listed one by one; the others are summed."""


@dataclass(frozen=True, eq=False)
class DataOutline:
    """An outline of how a split divides the training samples."""

    labels: tuple[str, ...]
    counts: NDArray[np.int64]
    """(clients, labels)."""
    names: tuple[str, ...]
    """By client; empty if clients have no names."""

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.counts.sum(axis=1)
        return found

    @cached_property
    def most_common_labels(self) -> NDArray[np.int64]:
        """Return each client's most frequent label, (clients,)."""
        found: NDArray[np.int64] = self.counts.argmax(axis=1)
        return found

    @cached_property
    def most_common_shares(self) -> NDArray[np.float64]:
        """Return the share of that label in each client's samples, (clients,)."""
        found: NDArray[np.float64] = self.counts.max(axis=1) / np.maximum(self.sizes, 1)
        return found

    @cached_property
    def spreads(self) -> dict[str, dict[str, float]]:
        """Return the quantiles over clients of samples, number of labels, and share of the most frequent label."""
        found = {
            "samples": self.sizes,
            "labels": (self.counts > 0).sum(axis=1),
            "commonest_share": self.most_common_shares,
        }
        places = list(QUANTILES.values())
        return {
            what: dict(zip(QUANTILES, np.quantile(values, places).tolist(), strict=True))
            for what, values in found.items()
        }

    def name(self, client: int) -> str:
        return self.names[client] if self.names else ""

    def as_dict(self) -> dict[str, Any]:
        """Return the outline for the REST API: the first NAMED clients one by one, the others as sums."""
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


def outline(divided: DataDivision) -> DataOutline:
    """Return the outline of a division, with at most as many labels as a chart can distinguish."""
    counts, labels = tables.limited_labels(divided.counts(), divided.labels.names)
    return DataOutline(labels, counts, divided.names)
