"""Choose which clients attack, as a function of the configuration. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from training.config.shape import Misfit
from training.federation import random_streams
from training.federation.config import FederationConfig
from training.runtime.seeds import derive_seed

NO_ATTACK = "none"


def attackers(config: FederationConfig) -> NDArray[np.int64]:
    """Return the ids of the attackers, ascending: those that are named, else a share of all, drawn by the seed."""
    if config.attack == NO_ATTACK:
        return np.zeros(0, dtype=np.int64)
    if config.attackers:
        return np.unique(np.array(config.attackers, dtype=np.int64))
    rng = np.random.RandomState(derive_seed(config.seed, random_streams.ATTACK) % 2**32)
    many = max(1, round(config.attacker_share * config.clients))
    return np.sort(rng.permutation(config.clients)[:many]).astype(np.int64)


def check(config: FederationConfig) -> Iterator[Misfit]:
    """Yield contradictions in the fields that name the attackers."""
    if config.attackers and config.attack == NO_ATTACK:
        yield Misfit("attackers", 'are named, but nobody attacks. Write attack = "sign_flip", or leave them out.')
    elif len(set(config.attackers)) < len(config.attackers):
        yield Misfit("attackers", "name a client more than once. Write each number once.")
    elif config.attackers and max(config.attackers) >= config.clients:
        text = f"name client {max(config.attackers)}, but clients are numbered from 0 to {config.clients - 1}."
        yield Misfit("attackers", f"{text} Write numbers below {config.clients}.")
