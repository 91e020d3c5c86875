"""Divide training and validation samples among clients by the chosen split. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from training.config.base import ConfigError, Problem
from training.config.shape import Misfit
from training.data import Ids, Labels, Split
from training.federation import parts, random_streams
from training.federation.apportionment import apportioned_owners
from training.federation.config import FederationConfig
from training.federation.parts import DataSplit
from training.federation.tables import NAME_CHARACTERS, readable
from training.runtime.seeds import derive_seed

EMPTY_CLIENTS = "without a sample"
"""In the message about a division that leaves clients empty: another seed may well work, so sweeps accept it."""


@dataclass(frozen=True)
class DataDivision:
    """A division of the samples among clients."""

    labels: Labels
    owners: dict[Split, NDArray[np.int64]]
    """By split, the client of each sample; -1: no client."""
    clients: int
    root: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The validation samples that the server trains on itself; they are not used for evaluation."""
    names: tuple[str, ...] = ()
    """By client, the owner of its samples; empty if clients have no names."""

    @cached_property
    def train(self) -> Sequence[Ids]:
        """Return the ids of each client's training samples, ascending."""
        return self._by_client("train")

    @cached_property
    def validation(self) -> Sequence[Ids]:
        return self._by_client("validation")

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        owners = self.owners["train"]
        return np.bincount(owners[owners >= 0], minlength=self.clients)

    @cached_property
    def validation_sizes(self) -> NDArray[np.int64]:
        """Return how many samples each client is evaluated on, (clients,)."""
        owners = self.owners["validation"]
        return np.bincount(owners[owners >= 0], minlength=self.clients)

    def counts(self) -> NDArray[np.int64]:
        """Return how many samples of each label a client trains on, (clients, labels)."""
        names, owners = max(1, len(self.labels.names)), self.owners["train"]
        pairs = (owners * names + self.labels.by_split["train"])[owners >= 0]
        return np.bincount(pairs, minlength=self.clients * names).reshape(self.clients, names)

    def _by_client(self, split: Split) -> Sequence[Ids]:
        owners = self.owners[split]
        order = np.argsort(owners, kind="stable")
        unowned = int((owners < 0).sum())
        ends = np.cumsum(np.bincount(owners[owners >= 0], minlength=self.clients))
        return _Slices(order[unowned:], np.concatenate([[0], ends]))


class _Slices(Sequence[Ids]):
    """Consecutive parts of one array. Tens of thousands of views would take more memory than the array."""

    def __init__(self, whole: Ids, bounds: NDArray[np.int64]) -> None:
        self._whole, self._bounds = whole, bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, place: int) -> Ids: ...
    @overload
    def __getitem__(self, place: slice) -> list[Ids]: ...
    def __getitem__(self, place: int | slice) -> Ids | list[Ids]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place %= len(self)
        return self._whole[self._bounds[place] : self._bounds[place + 1]]


def divide(config: FederationConfig, labels: Labels, split: DataSplit | None = None) -> DataDivision:
    """Divide the samples, equally on every machine. ConfigError if the split needs owners that the data do not name.

    `split`: that of a user's file; None: the one that the run names.
    """
    rng = np.random.RandomState(derive_seed(config.seed, random_streams.SPLIT) % 2**32)
    split = split or parts.split(config.split)
    if split.NATURAL and labels.owners is None:
        why = labels.unowned or 'the data do not name the owners of samples. Write "dirichlet".'
        raise ConfigError([Problem("run.split", f'is "{config.split}", but {why}')])
    used = _imbalanced_samples(config, labels)
    owners = np.full(len(labels.by_split["train"]), -1, dtype=np.int64)
    if len(used):  # else no client has any, and `check` reports it
        subset = _training_subset(labels, used)
        owners[used] = split.divide(subset, config.clients, rng, **config.options_of(config.split))
    validation = (
        _clients_of_owners(labels, owners) if split.NATURAL else _clients_by_label(labels, owners, config.clients, rng)
    )
    root = _root_ids(config, len(validation))
    validation[root] = -1
    names = _client_names(labels, owners, config.clients) if split.NATURAL else ()
    return DataDivision(labels, {"train": owners, "validation": validation}, config.clients, root, names)


def check(config: FederationConfig, divided: DataDivision) -> Iterator[Misfit]:
    """Yield what makes a division unusable, with the nearest setting that works."""
    validation, root = len(divided.owners["validation"]), root_samples(config)
    if root and validation < 2:
        yield Misfit("aggregation", f'"{config.aggregation}" needs validation samples. Keep some, or write "median".')
    elif root and root >= validation:
        text = f"are {root:,}, but there are {validation:,} validation samples, and some must remain for evaluation."
        yield Misfit(
            f"{config.aggregation}.root_samples", f"{text} Write at most {validation - 1:,}, better half of them."
        )
    empty = np.flatnonzero(divided.sizes == 0)
    samples = int(divided.sizes.sum())
    if config.class_imbalance > 1 and len(np.unique(divided.labels.by_split["train"])) < 2:
        yield Misfit("class_imbalance", f"is {config.class_imbalance:g}, but the samples have no classes. Write 1.")
    if not samples:
        yield Misfit("recipe", f'is "{config.recipe}", but its data leave nothing to train on. Hold out fewer of them.')
    elif samples < config.clients:
        yield Misfit("clients", f"are {config.clients:,}, but there are {samples:,} samples. Write at most {samples}.")
    elif len(empty):
        some = ", ".join(map(str, empty[:3])) + (", …" if len(empty) > 3 else "")
        message = f"leaves {len(empty):,} of {config.clients:,} clients {EMPTY_CLIENTS} ({some})."
        yield Misfit("split", f'"{config.split}" {message} Write fewer clients.')


def _imbalanced_samples(config: FederationConfig, labels: Labels) -> Ids:
    """Return the ids of the samples to train on, ascending: of each class geometrically fewer than of the one before.

    CIFAR-LT is made like this (Cui et al., 2019, arXiv 1901.05555). Validation samples are not changed.
    """
    labels_of_samples = labels.by_split["train"]
    classes, counts = np.unique(labels_of_samples, return_counts=True)
    if config.class_imbalance == 1 or len(classes) < 2:
        return np.arange(len(labels_of_samples))
    shares = config.class_imbalance ** -(np.arange(len(classes)) / (len(classes) - 1))
    wanted = np.maximum(1, np.floor((counts / shares).min() * shares + 1e-9).astype(np.int64))
    rng = np.random.RandomState(derive_seed(config.seed, random_streams.TAIL) % 2**32)
    rows = [
        rng.permutation(np.flatnonzero(labels_of_samples == label))[:many]
        for label, many in zip(classes.tolist(), wanted.tolist(), strict=True)
    ]
    return np.sort(np.concatenate(rows))


def _training_subset(labels: Labels, train: Ids) -> Labels:
    """Return the labels of these training samples, and of all validation samples."""
    owners = labels.owners and {**labels.owners, "train": labels.owners["train"][train]}
    return replace(labels, by_split={**labels.by_split, "train": labels.by_split["train"][train]}, owners=owners)


def _root_ids(config: FederationConfig, validation: int) -> Ids:
    """Return the validation samples that the server trains on, of `validation` in all."""
    wanted = root_samples(config)
    rng = np.random.RandomState(derive_seed(config.seed, random_streams.ROOT) % 2**32)
    return np.sort(rng.permutation(validation)[:wanted]) if wanted else np.zeros(0, dtype=np.int64)


def root_samples(config: FederationConfig) -> int:
    """Return how many samples the server trains on for the run's aggregation; 0 if it needs no update of the server."""
    trusted = parts.aggregation(config.aggregation).TRUSTED
    return int(config.options_of(config.aggregation)["root_samples"] or 0) if trusted else 0


def _clients_of_owners(labels: Labels, owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the client of each validation sample: the one that has its owner's training samples."""
    assert labels.owners is not None
    has = owners >= 0
    client_of = dict(zip(labels.owners["train"][has].tolist(), owners[has].tolist(), strict=True))
    clients = [client_of.get(owner, -1) for owner in labels.owners["validation"].tolist()]
    return np.array(clients, dtype=np.int64)


def _client_names(labels: Labels, clients_of: NDArray[np.int64], clients: int) -> tuple[str, ...]:
    """Return each client's name: its owner; of several the one with most samples, and how many more there are."""
    assert labels.owners is not None
    if not labels.owner_names:
        return ()
    has = clients_of >= 0
    owner_of_sample, clients_of = labels.owners["train"][has], clients_of[has]
    owners, first, counts = np.unique(owner_of_sample, return_index=True, return_counts=True)
    names_by_client: list[list[str]] = [[] for _ in range(clients)]
    for place in np.argsort(-counts, kind="stable").tolist():
        names_by_client[clients_of[first[place]]].append(labels.owner_names[owners[place]])
    return tuple(_joined_names(names) for names in names_by_client)


def _joined_names(names: list[str]) -> str:
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return readable(names[0])[: NAME_CHARACTERS - len(more)].strip() + more if names else ""


def _clients_by_label(
    labels: Labels, owners: NDArray[np.int64], clients: int, rng: np.random.RandomState
) -> NDArray[np.int64]:
    """Return the client of each validation sample, (samples,).

    Clients get each label in proportion to their training samples with that label.
    """
    train, validation = labels.by_split["train"], labels.by_split["validation"]
    found = np.zeros(len(validation), dtype=np.int64)
    for label in np.unique(validation):
        rows = rng.permutation(np.flatnonzero(validation == label))
        counts = np.bincount(owners[(train == label) & (owners >= 0)], minlength=clients).astype(np.float64)
        shares = counts / counts.sum() if counts.sum() else np.full(clients, 1 / clients)
        found[rows] = apportioned_owners(len(rows), shares)
    return found
