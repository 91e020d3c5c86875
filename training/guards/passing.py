"""A loss or gradient that was not finite, and is when the same step is done again: no network does that, hardware does.

Who it was is said only where that is known. A rank's own loss is of its own samples, so one that was not finite came
from the ranks that share those (tp, cp, pp: a model's parts), and from it alone where no other does. A gradient's norm
is all ranks' together, of replicas that stay apart, too (training.step.norms), so it is wrong everywhere at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from training.config.communication import PLAIN
from training.config.run_config import RunConfig
from training.guards.corruption import Corruption
from training.guards.nonfinite import Seen
from training.guards.numerics import Trouble

LARGEST_SQUARED = 1e18
"""A gradient above this is finite, and its square is not."""


def may_tell(config: RunConfig, *, apart: bool) -> bool:
    """Whether a step that comes out finite is proof: what is exchanged compressed, or in half precision, is not done
    again with it."""
    return str(config.dtype) != "fp16" and (apart or config.communication == PLAIN)


def did_not_recur(everybody: Sequence[Seen]) -> bool:
    norms = [parameter["gradient_norm"] for found in everybody for parameter in found.parameters]
    return all(found.is_clean for found in everybody) and max(norms, default=0.0) < LARGEST_SQUARED


def judge(troubles: Sequence[Trouble], *, shares: Sequence[int]) -> Corruption:
    """`troubles`: what the ranks have to say of that step; `shares`: by rank, which part of the batch it has."""
    among = _suspects(troubles, shares)
    first = min(troubles, key=lambda trouble: (not trouble.is_own, trouble.rank))
    return Corruption("redo", among if len(among) == 1 else (), among, first.what)


def _suspects(troubles: Sequence[Trouble], shares: Sequence[int]) -> tuple[int, ...]:
    named = {trouble.rank for trouble in troubles if trouble.is_own}
    theirs = {shares[rank] for rank in named}
    return tuple(rank for rank, share in enumerate(shares) if share in theirs or not named)
