"""Whose hardware it was, where a step that was not finite is so no more when it is done again."""

from __future__ import annotations

import pytest

from training.config.run_config import RunConfig
from training.guards import passing
from training.guards.nonfinite import Seen
from training.guards.numerics import Trouble


def _troubles(own: set[int], ranks: int) -> list[Trouble]:
    """Of each rank, since the norm is all ranks' together; `own`: whose loss it was."""
    return [Trouble("nonfinite", 9, "loss nan", rank, rank in own) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("own", "shares", "named", "among"),
    [
        ({2}, [0, 1, 2, 3], (2,), (2,)),
        ({1, 3}, [0, 1, 2, 3], (), (1, 3)),
        (set(), [0, 1, 2, 3], (), (0, 1, 2, 3)),
        ({1}, [0, 0, 1, 1], (), (0, 1)),  # the last of two stages, or one of two that split a matrix
        ({2, 3}, [0, 0, 1, 1], (), (2, 3)),
        (set(), [0], (0,), (0,)),
    ],
    ids=["one rank", "two ranks", "a gradient", "a stage", "a pair", "alone"],
)
def test_who_it_was_is_said_where_it_is_known(
    own: set[int], shares: list[int], named: tuple[int, ...], among: tuple[int, ...]
) -> None:
    found = passing.judge(_troubles(own, len(shares)), shares=shares)
    assert (found.check, found.ranks, found.among) == ("redo", named, among)


def test_what_may_be_too_large_to_square_or_was_not_redone_is_no_proof() -> None:
    clean = Seen(0, loss=1.0, parameters=[{"name": "head", "gradient_norm": 3.0}])
    large = Seen(1, loss=1.0, parameters=[{"name": "head", "gradient_norm": 1e25}])
    assert passing.did_not_recur([clean, clean])
    assert not passing.did_not_recur([clean, large])
    assert not passing.did_not_recur([clean, Seen(1, loss="nan")])
    assert not passing.may_tell(RunConfig(dtype="fp16"), apart=False)
    assert not passing.may_tell(RunConfig(communication="powersgd"), apart=False)
    assert passing.may_tell(RunConfig(communication="diloco"), apart=True)
    assert passing.may_tell(RunConfig(dtype="bf16"), apart=False)
