"""A little is enough: all attackers send mean − z · deviation of honest updates (Baruch et al., 2019, 1902.06156)."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.attack_simulation import Knowledge

COLLUDES = True


def forge(
    updates: Tensor,
    known: Knowledge,
    *,
    z: Annotated[
        float | None, "0..1000", "Deviations from the mean; left out: the most that passes for honest, by the paper."
    ] = None,
    source: Annotated[
        Literal["honest", "attackers"],
        "Whose updates mean and deviation are of: the honest clients', which attackers see, or the attackers' own "
        "before they attack, as in the paper; one attacker alone then sends its own.",
    ] = "honest",
) -> Tensor:
    rows = known.honest if source == "honest" else updates
    attackers = len(updates)
    if z is None:
        z = largest_z(len(known.honest) + attackers, attackers)
    forged = rows.mean(dim=0) - z * rows.std(dim=0, correction=0)
    return forged.expand_as(updates)


def largest_z(clients: int, attackers: int) -> float:
    """Return the paper's z_max: Φ(z) = (n − m − s) / (n − m), with s = ⌊n/2 + 1⌋ − m honest clients to win over.

    Attackers that are the majority need nobody: then z is that of one more to win over.
    """
    honest = clients - attackers
    needed = max(1, clients // 2 + 1 - attackers)
    share = (honest - needed) / honest
    return max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0
