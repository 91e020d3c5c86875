"""Which choices of a federation go together, and why others don't. docs/federated.md is made of this.

What stands here is refused before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator

from training.config import choices
from training.config.shape import Misfit
from training.federation.config import FOLDERS, FederationConfig


def check(config: FederationConfig) -> Iterator[Misfit]:
    """What of the run's choices contradicts another one."""
    algorithm = choices.get(FOLDERS["algorithm"], config.algorithm)
    paces = algorithm.constants.get("PACES")
    if isinstance(paces, tuple) and config.pace not in paces:
        yield Misfit(
            "pace", f'is "{config.pace}", but {config.algorithm} is for "{paces[0]}". Write pace = "{paces[0]}".'
        )
    sent = choices.get(FOLDERS["algorithm"], config.algorithm).constants.get("SENT")
    is_sum = choices.get(FOLDERS["aggregation"], config.aggregation).constants.get("IS_SUM")
    if not is_sum and isinstance(sent, dict) and sent and set(sent) != {"delta"}:
        more = ", ".join(sorted(set(sent) - {"delta"}))
        yield Misfit(
            "aggregation",
            f'"{config.aggregation}" combines one update a client, but {config.algorithm} sends {more}, too. '
            'Write "mean", or algorithm = "fedavg".',
        )
