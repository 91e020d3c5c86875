"""Load a user's split.py: which client has which samples, and how it sees them.

Rank 0 runs divide(), checks the result and broadcasts it, so that all ranks have the same division.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from training.config.base import ConfigError, Problem
from training.data import Batch, Labels
from training.federated.custom.isolated_rng import isolated_draws
from training.federated.custom.user_code import UserCode, UserFunctions
from training.federation import custom, random_streams
from training.federation.config import FederationConfig
from training.federation.parts import DataSplit
from training.runtime.distributed import World, from_rank_0
from training.runtime.seeds import derive_seed

Ids = NDArray[np.int64]


def load(config: FederationConfig, user_code: UserCode, world: World) -> DataSplit:
    """Return the split that the file defines; ConfigError if it lacks divide() or takes other options."""
    options = config.options_of(custom.SPLIT.choice)
    functions = UserFunctions(
        user_code, custom.SPLIT.key, names=["divide", "view"], required=["divide"], options=options
    )

    def first(labels: Labels, clients: int, rng: np.random.RandomState) -> Ids:
        samples = len(labels.by_split["train"])
        with isolated_draws(derive_seed(config.seed, random_streams.SPLIT, 1)):
            answer = functions.call("divide", _copied(labels), clients, rng)
        return _checked(f"divide() of {functions.file}", answer, samples, clients)

    def divide(labels: Labels, clients: int, rng: np.random.RandomState, **_: object) -> Ids:
        # A copy, so that later draws are equal on every rank, however many numbers the file draws on rank 0.
        return from_rank_0(world, lambda: first(labels, clients, copy.deepcopy(rng)))

    def view(batch: Batch, owners: Ids, seed: int, **_: object) -> Batch:
        answer = functions.call("view", batch, owners.copy(), seed)
        return _checked_view(f"view() of {functions.file}", answer, batch)

    return DataSplit(divide, view if "view" in functions else None)


class DivisionRecord:
    """Refuses a checkpoint that was trained with another division: the file may have changed since."""

    def __init__(self, file: str, owners: Ids) -> None:
        """`owners`: the client of each training sample."""
        self._file, self._digest = file, hashlib.sha256(owners.astype("<i8").tobytes()).hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self._digest}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        if stored.get("digest", self._digest) != self._digest:
            text = f"{self._file} divides the samples differently than for the checkpoint. Restore the earlier file"
            raise ConfigError([Problem(f"client.{custom.SPLIT.key}", f"{text}, or start over with --resume none.")])


def _copied(labels: Labels) -> Labels:
    """Return a copy that the file may change."""
    owners = labels.owners and {name: values.copy() for name, values in labels.owners.items()}
    return replace(labels, by_split={name: values.copy() for name, values in labels.by_split.items()}, owners=owners)


def _checked(what: str, answer: Any, samples: int, clients: int) -> Ids:
    """Return the client of each sample (samples,)."""
    expected = (
        f"Return {samples:,} integers from 0 to {clients - 1}: the client of each sample of labels.by_split['train']"
    )
    try:
        found = np.asarray(answer)
    except (TypeError, ValueError):
        found = np.asarray(None)
    if found.shape != (samples,) or found.dtype.kind not in "iu":
        given = f"an array of {found.dtype} of shape {found.shape}" if found.ndim else f"a {type(answer).__name__}"
        raise TypeError(f"{what} returns {given}. {expected}")
    if samples and not (found.min() >= 0 and found.max() < clients):
        wrong = found[(found < 0) | (found >= clients)][0]
        raise ValueError(f"{what} assigns a sample to client {wrong}. {expected}")
    empty = np.flatnonzero(np.bincount(found.astype(np.int64), minlength=clients) == 0)
    if len(empty) and samples >= clients:
        some = ", ".join(map(str, empty[:3].tolist())) + (", …" if len(empty) > 3 else "")
        raise ValueError(
            f"{what} assigns no sample to {len(empty):,} of {clients:,} clients ({some}). Assign at least one to each"
        )
    return found.astype(np.int64)


def _checked_view(what: str, answer: Any, batch: Batch) -> Batch:
    """Return the result of view() if it has as many parts, of as many samples, as `batch`; else raise."""
    expected = f"Return a tuple of {len(batch)} tensors of {len(batch[0])} samples each, as batch is"
    if not isinstance(answer, tuple | list) or not all(isinstance(part, Tensor) and part.dim() for part in answer):
        raise TypeError(f"{what} returns a {type(answer).__name__}. {expected}")
    if [len(part) for part in answer] != [len(part) for part in batch]:
        raise ValueError(f"{what} returns parts of {', '.join(str(len(part)) for part in answer)} samples. {expected}")
    return tuple(answer)
