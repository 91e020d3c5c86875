"""Somebody's selection.py: who takes part in a round. Rank 0 runs it, checks the answer and gives it to the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.federated.custom.isolated_rng import isolated_draws
from training.federated.custom.program import Functions, Program
from training.federation import custom, random_streams
from training.federation.client_selection import Asked
from training.federation.config import FederationConfig
from training.federation.parts import Selection
from training.runtime.distributed import World, from_first
from training.runtime.seeds import derive_seed

Ids = NDArray[np.int64]


def load(config: FederationConfig, program: Program, world: World) -> Selection:
    """Return the selection that the file defines; ConfigError if it lacks select() or takes other options."""
    options = config.options_of(custom.SELECTION.choice)
    functions = Functions(program, custom.SELECTION.key, names=["select"], needed=["select"], options=options)

    def first(asked: Asked) -> Ids:
        with isolated_draws(derive_seed(asked.seed, random_streams.SELECTION, asked.round, asked.attempt, 1)):
            answer = functions.call("select", _copied(asked))
        return _checked(f"select() of {functions.file}", answer, asked)

    def select(asked: Asked, **_: object) -> Ids:
        return from_first(world, lambda: first(asked))

    return Selection(select)


def _copied(asked: Asked) -> Asked:
    """Return what the file may change without changing what the server remembers."""
    arrays = {name: getattr(asked, name).copy() for name in ("eligible", "samples", "losses", "last_rounds")}
    return replace(asked, **arrays)


def _checked(what: str, answer: Any, asked: Asked) -> Ids:
    """Return the clients (clients,), ascending."""
    wanted = "Return client numbers from round.eligible, ascending, as an array of whole numbers"
    try:
        found = np.asarray(answer)
    except (TypeError, ValueError):
        found = np.asarray(None)
    if found.size == 0 and found.ndim == 1:
        raise ValueError(f"{what} returns no client in round {asked.round}. Return at least one of round.eligible")
    if found.dtype == np.bool_:
        raise TypeError(f"{what} returns true and false. Return client numbers: round.eligible[mask]")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        given = f"an array of {found.dtype} of shape {found.shape}" if found.ndim else f"a {type(answer).__name__}"
        raise TypeError(f"{what} returns {given}. {wanted}")
    found = found.astype(np.int64)
    if len(strange := np.setdiff1d(found, asked.eligible)):
        raise ValueError(f"{what} returns client {strange[0]}, which is not in round.eligible. {wanted}")
    if (np.diff(found) <= 0).any():
        raise ValueError(f"{what} returns clients that are not ascending, or one twice. Return np.unique(…) of them")
    return found
