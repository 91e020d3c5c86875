"""Recognise a hardware fault: a loss or gradient that is finite when a step that was not finite is repeated.

A rank is named only where that is certain. A rank's loss is of its own samples, so a non-finite one came from the ranks
that share those samples (tp, cp, pp: parts of one model), and from that rank alone where no other shares them. The
gradient norm is computed over all ranks, even if replicas synchronise rarely (training.step.norms), so it is non-finite
on all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from training.config.communication import PLAIN
from training.config.run_config import RunConfig
from training.guards.corruption import Corruption
from training.guards.nonfinite import RankDiagnosis
from training.guards.numerics import Trouble

MAX_SQUARABLE_NORM = 1e18
"""A gradient above this is finite, but its square is not."""


def is_conclusive(config: RunConfig, *, has_independent_replicas: bool) -> bool:
    """Return whether a finite repetition proves a fault of hardware.

    It does not with fp16, nor if exchanges are compressed: these are not repeated.
    """
    return str(config.dtype) != "fp16" and (has_independent_replicas or config.communication == PLAIN)


def did_not_recur(diagnoses: Sequence[RankDiagnosis]) -> bool:
    norms = [parameter["gradient_norm"] for diagnosis in diagnoses for parameter in diagnosis.parameters]
    return all(found.is_clean for found in diagnoses) and max(norms, default=0.0) < MAX_SQUARABLE_NORM


def judge(troubles: Sequence[Trouble], *, shares: Sequence[int]) -> Corruption:
    """Return the corruption.

    `troubles`: what the ranks found in that step; `shares`: by rank, its part of the batch.
    """
    among = _suspects(troubles, shares)
    first = min(troubles, key=lambda trouble: (not trouble.is_local, trouble.rank))
    return Corruption("redo", among if len(among) == 1 else (), among, first.what)


def _suspects(troubles: Sequence[Trouble], shares: Sequence[int]) -> tuple[int, ...]:
    named = {trouble.rank for trouble in troubles if trouble.is_local}
    affected = {shares[rank] for rank in named}
    return tuple(rank for rank, share in enumerate(shares) if share in affected or not named)
