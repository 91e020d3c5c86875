"""Label flipping: attackers train honestly on false labels (Fang et al., 2020, arXiv 1911.11815)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from training.config.shape import Misfit

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.attack_simulation import AttackerKnowledge
    from training.federation.config import FederationConfig

CHANGES_UPDATES = False


def relabel(
    labels: Tensor,
    classes: Tensor,
    *,
    source: Annotated[int | None, "0..1000000", "The only label that is changed; default: all are."] = None,
    target: Annotated[int | None, "0..1000000", "The label that it becomes; default: labels in reverse order."] = None,
) -> Tensor:
    """Return label L − 1 − l for each l of L classes; with a source and a target (2007.08432) only that one changes."""
    import torch

    if source is None:
        return classes.flip(0)[torch.searchsorted(classes, labels)]
    return torch.where(labels == source, torch.full_like(labels, int(target or 0)), labels)


def forge(updates: Tensor, knowledge: AttackerKnowledge, **options: object) -> Tensor:
    return updates


def check(config: FederationConfig) -> Iterator[Misfit]:
    options = config.options_of("label_flip")
    if (options["source"] is None) != (options["target"] is None):
        yield Misfit("label_flip.target", "needs a source, and a source needs it: give both, or neither.")
