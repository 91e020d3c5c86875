"""Test which rank's hardware is at fault if a non-finite step is finite when it is repeated."""

from __future__ import annotations

import pytest

from training.config.run_config import RunConfig
from training.guards import transient
from training.guards.nonfinite import RankDiagnosis
from training.guards.numerics import Trouble


def _troubles(nonfinite: set[int], ranks: int) -> list[Trouble]:
    """Return a trouble on each rank, as the norm is that of all ranks. `nonfinite`: ranks with a loss that is NaN."""
    return [Trouble("nonfinite", 9, "loss nan", rank, rank in nonfinite) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("nonfinite", "shares", "named", "among"),
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
def test_the_faulty_rank_is_named_if_it_can_be_determined(
    nonfinite: set[int], shares: list[int], named: tuple[int, ...], among: tuple[int, ...]
) -> None:
    found = transient.judge(_troubles(nonfinite, len(shares)), shares=shares)
    assert (found.check, found.ranks, found.among) == ("redo", named, among)


def test_what_may_be_too_large_to_square_or_was_not_redone_is_no_proof() -> None:
    clean = RankDiagnosis(0, loss=1.0, parameters=[{"name": "head", "gradient_norm": 3.0}])
    large = RankDiagnosis(1, loss=1.0, parameters=[{"name": "head", "gradient_norm": 1e25}])
    assert transient.did_not_recur([clean, clean])
    assert not transient.did_not_recur([clean, large])
    assert not transient.did_not_recur([clean, RankDiagnosis(1, loss="nan")])
    assert not transient.is_conclusive(RunConfig(dtype="fp16"), has_independent_replicas=False)
    assert not transient.is_conclusive(RunConfig(communication="powersgd"), has_independent_replicas=False)
    assert transient.is_conclusive(RunConfig(communication="diloco"), has_independent_replicas=True)
    assert transient.is_conclusive(RunConfig(dtype="bf16"), has_independent_replicas=False)
