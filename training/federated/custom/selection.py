"""Load a user's selection.py, which selects the clients of a round.

Rank 0 runs it, checks the result and broadcasts it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.federated.custom.isolated_rng import isolated_draws
from training.federated.custom.user_code import UserCode, UserFunctions
from training.federation import custom, random_streams
from training.federation.client_selection import SelectionContext
from training.federation.config import FederationConfig
from training.federation.parts import Selection
from training.runtime.distributed import World, from_rank_0
from training.runtime.seeds import derive_seed

Ids = NDArray[np.int64]


def load(config: FederationConfig, user_code: UserCode, world: World) -> Selection:
    """Return the selection that the file defines; ConfigError if it lacks select() or takes other options."""
    options = config.options_of(custom.SELECTION.choice)
    functions = UserFunctions(user_code, custom.SELECTION.key, names=["select"], required=["select"], options=options)

    def first(context: SelectionContext) -> Ids:
        with isolated_draws(derive_seed(context.seed, random_streams.SELECTION, context.round, context.attempt, 1)):
            answer = functions.call("select", _copied(context))
        return _checked(f"select() of {functions.file}", answer, context)

    def select(context: SelectionContext, **_: object) -> Ids:
        return from_rank_0(world, lambda: first(context))

    return Selection(select)


def _copied(context: SelectionContext) -> SelectionContext:
    """Return a copy whose arrays the file may change without changing the server's state."""
    arrays = {name: getattr(context, name).copy() for name in ("eligible", "samples", "losses", "last_rounds")}
    return replace(context, **arrays)


def _checked(what: str, answer: Any, context: SelectionContext) -> Ids:
    """Return the clients (clients,), ascending; raise if select() returned something else."""
    expected = "Return client ids from round.eligible, ascending, as an array of integers"
    try:
        found = np.asarray(answer)
    except (TypeError, ValueError):
        found = np.asarray(None)
    if found.size == 0 and found.ndim == 1:
        raise ValueError(f"{what} returns no client in round {context.round}. Return at least one of round.eligible")
    if found.dtype == np.bool_:
        raise TypeError(f"{what} returns true and false. Return client ids: round.eligible[mask]")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        given = f"an array of {found.dtype} of shape {found.shape}" if found.ndim else f"a {type(answer).__name__}"
        raise TypeError(f"{what} returns {given}. {expected}")
    found = found.astype(np.int64)
    if len(ineligible := np.setdiff1d(found, context.eligible)):
        raise ValueError(f"{what} returns client {ineligible[0]}, which is not in round.eligible. {expected}")
    if (np.diff(found) <= 0).any():
        raise ValueError(f"{what} returns clients that are not ascending, or one twice. Return np.unique(…) of them")
    return found
