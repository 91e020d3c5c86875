"""Which client has which samples: by the chosen split, to train on, and alike to be judged by. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from training.config.asked import ConfigError, Problem
from training.config.shape import Misfit
from training.data import Ids, Labels, Split
from training.federation import parts, random_streams
from training.federation.apportionment import shared_out
from training.federation.config import FederationConfig
from training.federation.parts import DataSplit
from training.federation.tables import NAME_LETTERS, readable
from training.runtime.seeds import derive_seed

EMPTY = "without a sample"
"""Said of clients where a division is refused by how it was drawn: with another seed it may well be taken."""


@dataclass(frozen=True)
class Divided:
    """The samples of each client."""

    labels: Labels
    owners: dict[Split, NDArray[np.int64]]
    """The client of each sample; -1: nobody's."""
    clients: int
    root: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Of those kept for validation, the samples that the server trains on itself; nobody is judged by them."""
    names: tuple[str, ...] = ()
    """By client, whose samples it has by nature; empty: clients go by their numbers."""

    @cached_property
    def train(self) -> Sequence[Ids]:
        """By client, its samples' ids, ascending."""
        return self._by_client("train")

    @cached_property
    def validation(self) -> Sequence[Ids]:
        return self._by_client("validation")

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        owners = self.owners["train"]
        return np.bincount(owners[owners >= 0], minlength=self.clients)

    @cached_property
    def evaluated(self) -> NDArray[np.int64]:
        """(clients,): samples that each is evaluated on."""
        owners = self.owners["validation"]
        return np.bincount(owners[owners >= 0], minlength=self.clients)

    def counts(self) -> NDArray[np.int64]:
        """(clients, labels): how many of each a client trains on. The picture."""
        names, owners = max(1, len(self.labels.names)), self.owners["train"]
        pairs = (owners * names + self.labels.of["train"])[owners >= 0]
        return np.bincount(pairs, minlength=self.clients * names).reshape(self.clients, names)

    def _by_client(self, split: Split) -> Sequence[Ids]:
        owners = self.owners[split]
        order = np.argsort(owners, kind="stable")
        nobodys = int((owners < 0).sum())
        ends = np.cumsum(np.bincount(owners[owners >= 0], minlength=self.clients))
        return _Slices(order[nobodys:], np.concatenate([[0], ends]))


class _Slices(Sequence[Ids]):
    """Parts of one array, one after the other: tens of thousands of views would take more memory than it does."""

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
            return [self[one] for one in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place %= len(self)
        return self._whole[self._bounds[place] : self._bounds[place + 1]]


def divide(config: FederationConfig, labels: Labels, split: DataSplit | None = None) -> Divided:
    """The same for the same seed, wherever it is asked. ConfigError if it goes by owners whom nobody knows.

    `split`: somebody's own; None: the one that the run names.
    """
    draw = np.random.RandomState(derive_seed(config.seed, random_streams.SPLIT) % 2**32)
    split = split or parts.split(config.split)
    if split.NATURAL and labels.owners is None:
        why = labels.unowned or 'nobody knows whose the samples are. Write "dirichlet".'
        raise ConfigError([Problem("run.split", f'is "{config.split}", but {why}')])
    used = _used(config, labels)
    owners = np.full(len(labels.of["train"]), -1, dtype=np.int64)
    if len(used):  # else nobody has any, and `check` says so
        some = _only(labels, used)
        owners[used] = split.divide(some, config.clients, draw, **config.options_of(config.split))
    alike = _of_their_owners(labels, owners) if split.NATURAL else _alike(labels, owners, config.clients, draw)
    root = _root(config, len(alike))
    alike[root] = -1
    names = _names(labels, owners, config.clients) if split.NATURAL else ()
    return Divided(labels, {"train": owners, "validation": alike}, config.clients, root, names)


def check(config: FederationConfig, divided: Divided) -> Iterator[Misfit]:
    """What of a division can't be worked with, and the nearest that can."""
    kept, root = len(divided.owners["validation"]), root_samples(config)
    if root and kept < 2:
        yield Misfit(
            "aggregation", f'"{config.aggregation}" needs samples kept for validation. Keep some, or "median".'
        )
    elif root and root >= kept:
        text = f"are {root:,}, but {kept:,} are kept for validation, and some must stay to judge by."
        yield Misfit(f"{config.aggregation}.root_samples", f"{text} Write at most {kept - 1:,}, better half of them.")
    empty = np.flatnonzero(divided.sizes == 0)
    samples = int(divided.sizes.sum())
    if config.class_imbalance > 1 and len(np.unique(divided.labels.of["train"])) < 2:
        yield Misfit("class_imbalance", f"is {config.class_imbalance:g}, but the samples have no classes. Write 1.")
    if not samples:
        yield Misfit(
            "recipe", f'is "{config.recipe}", but its data leave nothing to train on. Keep less of them apart.'
        )
    elif samples < config.clients:
        yield Misfit("clients", f"are {config.clients:,}, but there are {samples:,} samples. Write at most {samples}.")
    elif len(empty):
        some = ", ".join(map(str, empty[:3])) + (", …" if len(empty) > 3 else "")
        message = f"leaves {len(empty):,} of {config.clients:,} clients {EMPTY} ({some})."
        yield Misfit("split", f'"{config.split}" {message} Write fewer clients.')


def _used(config: FederationConfig, labels: Labels) -> Ids:
    """Return the samples that are trained on, ascending: of each class geometrically fewer than of the one before.

    As CIFAR-LT is made (Cui et al., 2019, arXiv 1901.05555); what is kept for validation stays as it is.
    """
    of = labels.of["train"]
    classes, counts = np.unique(of, return_counts=True)
    if config.class_imbalance == 1 or len(classes) < 2:
        return np.arange(len(of))
    shares = config.class_imbalance ** -(np.arange(len(classes)) / (len(classes) - 1))
    wanted = np.maximum(1, np.floor((counts / shares).min() * shares + 1e-9).astype(np.int64))
    draw = np.random.RandomState(derive_seed(config.seed, random_streams.TAIL) % 2**32)
    rows = [
        draw.permutation(np.flatnonzero(of == label))[:many]
        for label, many in zip(classes.tolist(), wanted.tolist(), strict=True)
    ]
    return np.sort(np.concatenate(rows))


def _only(labels: Labels, train: Ids) -> Labels:
    """Return the labels of these training samples, and of all that are kept for validation."""
    owners = labels.owners and {**labels.owners, "train": labels.owners["train"][train]}
    return replace(labels, of={**labels.of, "train": labels.of["train"][train]}, owners=owners)


def _root(config: FederationConfig, validation: int) -> Ids:
    """What the server trains on itself, of so many samples that are kept for validation."""
    asked = root_samples(config)
    draw = np.random.RandomState(derive_seed(config.seed, random_streams.ROOT) % 2**32)
    return np.sort(draw.permutation(validation)[:asked]) if asked else np.zeros(0, dtype=np.int64)


def root_samples(config: FederationConfig) -> int:
    """How many the run's aggregation wants the server to train on; 0: it trusts no such update."""
    trusted = parts.aggregation(config.aggregation).TRUSTED
    return int(config.options_of(config.aggregation)["root_samples"] or 0) if trusted else 0


def _of_their_owners(labels: Labels, owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """The client of each sample that is kept for validation: whoever has its owner's others."""
    assert labels.owners is not None
    has = owners >= 0
    client_of = dict(zip(labels.owners["train"][has].tolist(), owners[has].tolist(), strict=True))
    own = [client_of.get(owner, -1) for owner in labels.owners["validation"].tolist()]
    return np.array(own, dtype=np.int64)


def _names(labels: Labels, clients_of: NDArray[np.int64], clients: int) -> tuple[str, ...]:
    """By client its owner; of several the one with most samples, and how many more there are."""
    assert labels.owners is not None
    if not labels.owner_names:
        return ()
    has = clients_of >= 0
    whose, clients_of = labels.owners["train"][has], clients_of[has]
    owners, first, counts = np.unique(whose, return_index=True, return_counts=True)
    held: list[list[str]] = [[] for _ in range(clients)]
    for place in np.argsort(-counts, kind="stable").tolist():
        held[clients_of[first[place]]].append(labels.owner_names[owners[place]])
    return tuple(_together(names) for names in held)


def _together(names: list[str]) -> str:
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return readable(names[0])[: NAME_LETTERS - len(more)].strip() + more if names else ""


def _alike(labels: Labels, owners: NDArray[np.int64], clients: int, draw: np.random.RandomState) -> NDArray[np.int64]:
    """The client of each sample that is kept for validation: of each label as many as of those that it trains on."""
    train, validation = labels.of["train"], labels.of["validation"]
    found = np.zeros(len(validation), dtype=np.int64)
    for label in np.unique(validation):
        rows = draw.permutation(np.flatnonzero(validation == label))
        counts = np.bincount(owners[(train == label) & (owners >= 0)], minlength=clients).astype(np.float64)
        shares = counts / counts.sum() if counts.sum() else np.full(clients, 1 / clients)
        found[rows] = shared_out(len(rows), shares)
    return found
