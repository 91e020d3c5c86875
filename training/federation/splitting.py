"""Which client has which samples: by the chosen split, to train on, and alike to be judged by. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from training import contracts
from training.config.asked import ConfigError, Problem
from training.config.shape import Misfit
from training.data import Ids, Labels, Split
from training.federation.config import FederationConfig
from training.federation.shares import shared_out
from training.runtime.seeds import derive_seed

DRAWN = 1
"""Of what is derived from a run's seed, this number is for the split."""


@dataclass(frozen=True)
class Divided:
    """The samples of each client."""

    labels: Labels
    owners: dict[Split, NDArray[np.int64]]
    """The client of each sample; -1: nobody's."""
    clients: int

    @cached_property
    def train(self) -> list[Ids]:
        """By client, its samples' ids, ascending."""
        return self._by_client("train")

    @cached_property
    def validation(self) -> list[Ids]:
        return self._by_client("validation")

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        return np.bincount(self.owners["train"], minlength=self.clients)

    def counts(self) -> NDArray[np.int64]:
        """(clients, labels): how many of each a client trains on. The picture."""
        names = max(1, len(self.labels.names))
        pairs = self.owners["train"] * names + self.labels.of["train"]
        return np.bincount(pairs, minlength=self.clients * names).reshape(self.clients, names)

    def _by_client(self, split: Split) -> list[Ids]:
        owners = self.owners[split]
        order = np.argsort(owners, kind="stable")
        nobodys = int((owners < 0).sum())
        bounds = np.cumsum(np.bincount(owners[owners >= 0], minlength=self.clients))[:-1]
        return np.split(order[nobodys:], bounds)


def divide(config: FederationConfig, labels: Labels) -> Divided:
    """The same for the same seed, wherever it is asked. ConfigError if it goes by owners whom nobody knows."""
    draw = np.random.RandomState(derive_seed(config.seed, DRAWN) % 2**32)
    split = contracts.split(config.split)
    if split.NATURAL and labels.owners is None:
        why = labels.unowned or 'nobody knows whose the samples are. Write "dirichlet".'
        raise ConfigError([Problem("run.split", f'is "{config.split}", but {why}')])
    owners = split.divide(labels, config.clients, draw, **config.options_of(config.split))
    alike = _of_their_owners(labels, owners) if split.NATURAL else _alike(labels, owners, config.clients, draw)
    return Divided(labels, {"train": owners, "validation": alike}, config.clients)


def check(config: FederationConfig, divided: Divided) -> Iterator[Misfit]:
    """What of a division can't be worked with, and the nearest that can."""
    empty = np.flatnonzero(divided.sizes == 0)
    samples = len(divided.owners["train"])
    if samples < config.clients:
        yield Misfit("clients", f"are {config.clients:,}, but there are {samples:,} samples. Write at most {samples}.")
    elif len(empty):
        some = ", ".join(map(str, empty[:3])) + (", …" if len(empty) > 3 else "")
        message = f"leaves {len(empty):,} of {config.clients:,} clients without a sample ({some})."
        remedies = {"dirichlet": "Write a larger alpha in [run.dirichlet], or fewer clients."}
        yield Misfit("split", f'"{config.split}" {message} {remedies.get(config.split, "Write fewer clients.")}')


def _of_their_owners(labels: Labels, owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """The client of each sample that is kept for validation: whoever has its owner's others."""
    assert labels.owners is not None
    client_of = dict(zip(labels.owners["train"].tolist(), owners.tolist(), strict=True))
    own = [client_of.get(owner, -1) for owner in labels.owners["validation"].tolist()]
    return np.array(own, dtype=np.int64)


def _alike(labels: Labels, owners: NDArray[np.int64], clients: int, draw: np.random.RandomState) -> NDArray[np.int64]:
    """The client of each sample that is kept for validation: of each label as many as of those that it trains on."""
    train, validation = labels.of["train"], labels.of["validation"]
    found = np.zeros(len(validation), dtype=np.int64)
    for label in np.unique(validation):
        rows = draw.permutation(np.flatnonzero(validation == label))
        counts = np.bincount(owners[train == label], minlength=clients).astype(np.float64)
        parts = counts / counts.sum() if counts.sum() else np.full(clients, 1 / clients)
        found[rows] = shared_out(len(rows), parts)
    return found
