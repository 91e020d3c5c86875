"""Load a user's aggregation.py as an aggregation rule.

Rank 0 alone runs it (training.federated.update_combiner), and its result is checked. Every vector that leaves a client
passes through it: the updates of a round and, where layers normalise over a batch, their running statistics in a second
call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.federated.custom.isolated_rng import isolated_draws
from training.federated.custom.user_code import UserCode, UserFunctions
from training.federation import custom
from training.federation.config import FederationConfig
from training.federation.parts import Aggregation


def load(config: FederationConfig, user_code: UserCode) -> Aggregation:
    """Return the rule that the file defines; ConfigError if it lacks combine() or takes other options."""
    options = config.options_of(custom.AGGREGATION.choice)
    functions = UserFunctions(
        user_code, custom.AGGREGATION.key, names=["combine"], required=["combine"], options=options
    )

    def combine(rows: Tensor, weights: Tensor, **_: object) -> tuple[Tensor, list[int]]:
        clients, size = rows.shape
        with isolated_draws():
            answer = functions.call("combine", rows, weights.clone())
        what = f"combine() of {functions.file}"
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise TypeError(f"{what} returns {_described(answer)}. Return a row and the places left out: row, []")
        row = _checked_row(what, answer[0], size, rows.dtype)
        return row.to(rows.device), _checked_places(what, answer[1], clients)

    return Aggregation(combine)


def _checked_row(what: str, row: Any, size: int, dtype: torch.dtype) -> Tensor:
    """Return the combined vector (size,) in float64; `dtype`: that of the model, which is to hold it."""
    wanted = f"Return a tensor of shape ({size},), as one of rows is"
    if not isinstance(row, Tensor) or row.shape != (size,):
        raise TypeError(f"{what} returns {_described(row)} as the row. {wanted}")
    if not row.is_floating_point():
        raise TypeError(f"{what} returns a row of {row.dtype}. Return a floating-point tensor")
    if row.layout is not torch.strided or row.is_meta:
        kind = "on meta" if row.is_meta else row.layout
        raise TypeError(f"{what} returns a row that is {kind}. Return a dense tensor")
    found = row.detach().double().contiguous()
    is_finite = found.to(dtype).isfinite()  # else every client would send NaN in the next round
    if not bool(is_finite.all()):
        raise ValueError(
            f"{what} returns a row with {int((~is_finite).sum()):,} NaN or Inf in {dtype}. All rows are finite"
        )
    return found


def _checked_places(what: str, places: Any, clients: int) -> list[int]:
    """Return which rows are left out, ascending."""
    wanted = f"Return integers from 0 to {clients - 1}, the places in rows; [] for none"
    found = _whole_numbers(places, clients)
    if found is None:
        raise TypeError(f"{what} returns {_described(places)} as the places left out. {wanted}")
    if wrong := [place for place in found if not 0 <= place < clients]:
        raise ValueError(f"{what} leaves out place {wrong[0]} of {clients} rows. {wanted}")
    if len(set(found)) < len(found):
        raise ValueError(f"{what} names a place twice among those left out. Return each once")
    if len(found) == clients:
        raise ValueError(
            f"{what} leaves out all {clients} rows. Keep one, or raise training.federation.parts.TooFewUpdates: the "
            "round is then tried again with other clients"
        )
    return sorted(found)


def _whole_numbers(places: Any, most: int) -> list[int] | None:
    """Return the numbers of a list, a tuple, an array or a tensor of one dim; None if they are something else.

    Of more than `most` numbers it reads one more, which is enough to refuse them.
    """
    if isinstance(places, Tensor | np.ndarray):
        places = places.tolist()
    if not isinstance(places, Sequence) or isinstance(places, str):
        return None
    places = places[: most + 1]
    is_whole = all(isinstance(place, int | np.integer) and not isinstance(place, bool) for place in places)
    return [int(place) for place in places] if is_whole else None


def _described(answer: Any) -> str:
    if isinstance(answer, Tensor | np.ndarray):
        kind = "tensor" if isinstance(answer, torch.Tensor) else "numpy array"
        return f"a {kind} of shape {tuple(answer.shape)}"
    return f"a {type(answer).__name__}"
