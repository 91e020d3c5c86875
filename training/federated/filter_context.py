"""The input of filters besides the rows that they transform."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from training.federated.schedule import Ids
from training.federation import random_streams
from training.runtime.seeds import derive_seed


@dataclass(frozen=True)
class FilterContext:
    """The clients, round and state of the rows that pass through a filter, one row for each client."""

    clients: Ids
    round: int
    seed: int
    """The run's seed, which `generator` derives others from."""
    size: int
    """Length of a row that the filter is given."""
    dtype: torch.dtype
    """The dtype of such a row."""
    state: Mapping[str, Tensor]
    """The clients' state, (clients, …) by the names in the filter's `begin`."""

    def generator(self, *more: int) -> torch.Generator:
        """Return a generator for this round and `more`, on the CPU so that all devices draw the same numbers."""
        return torch.Generator().manual_seed(derive_seed(self.seed, random_streams.FILTER, self.round, *more))
