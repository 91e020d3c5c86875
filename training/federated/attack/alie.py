"""A little is enough: all attackers send mean − z · deviation of honest updates (Baruch et al., 2019, 1902.06156)."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.attack_simulation import AttackerKnowledge

COLLUDES = True


def forge(
    updates: Tensor,
    knowledge: AttackerKnowledge,
    *,
    z: Annotated[float | None, "0..1000", "Standard deviations from the mean; default: the paper's z_max."] = None,
    source: Annotated[
        Literal["honest", "attackers"],
        "Updates that mean and deviation are estimated from: the honest clients', which attackers see, or the "
        "attackers' own before they attack, as in the paper; a single attacker then sends its own.",
    ] = "honest",
) -> Tensor:
    rows = knowledge.honest if source == "honest" else updates
    attackers = len(updates)
    if z is None:
        z = largest_z(len(knowledge.honest) + attackers, attackers)
    forged = rows.mean(dim=0) - z * rows.std(dim=0, correction=0)
    return forged.expand_as(updates)


def largest_z(clients: int, attackers: int) -> float:
    """Return the paper's z_max: Φ(z) = (n − m − s) / (n − m), with s = ⌊n/2 + 1⌋ − m supporters among honest clients.

    If attackers are the majority, s is 1.
    """
    honest = clients - attackers
    needed = max(1, clients // 2 + 1 - attackers)
    share = (honest - needed) / honest
    return max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0
