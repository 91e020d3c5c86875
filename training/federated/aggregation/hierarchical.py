"""Hierarchical: clients are combined in groups, and then the groups (Liu et al., 2020, arXiv 1905.06641)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from training.config.shape import Misfit
from training.federated.aggregation._robust import expected_updates, require_updates
from training.federation import parts
from training.federation.parts import TooFewUpdates

if TYPE_CHECKING:
    from torch import Tensor

    from training.federation.config import FederationConfig

NEEDS = {"mean": (0, 1), "norm_clipping": (0, 1), "median": (2, 1), "trimmed_mean": (2, 1), "krum": (2, 3)}
"""(each, more) by rule: it needs each · f + more updates to tolerate f bad ones."""
F = {"median": "f", "trimmed_mean": "trim", "krum": "f"}
"""The option of each rule that takes f."""


def combine(
    rows: Tensor,
    weights: Tensor,
    *,
    groups: Annotated[int, "2..10000", "Groups of a round's clients, by consecutive client ids."] = 2,
    inner: Annotated[
        Literal["mean", "median", "trimmed_mean", "krum", "norm_clipping"], "Aggregation within each group."
    ] = "mean",
    outer: Annotated[
        Literal["mean", "median", "trimmed_mean", "krum", "norm_clipping"], "Aggregation of the groups."
    ] = "median",
    f: Annotated[int, "0..50000", "Bad clients of a group, and bad groups, that the rules tolerate."] = 0,
) -> tuple[Tensor, Sequence[int]]:
    """Combine each group, and then the groups, weighted by the total weight of their clients that count."""
    import torch

    require_updates(rows, groups)
    parts = torch.arange(len(rows)).tensor_split(groups)
    found = [_apply_rule(inner, rows[part], weights[part], f) for part in parts]
    left_out = [int(part[place]) for part, (_, out) in zip(parts, found, strict=True) for place in out]
    weight = weights.clone()
    weight[left_out] = 0
    heavy = torch.stack([weight[part].sum() for part in parts])
    combined, bad = _apply_rule(outer, torch.stack([row for row, _ in found]), heavy, f)
    away = {int(client) for group in bad for client in parts[group]}
    return combined, sorted(away | set(left_out))


def check(config: FederationConfig) -> Iterator[Misfit]:
    options = config.options_of("hierarchical")
    groups, f = int(options["groups"] or 0), int(options["f"] or 0)
    inner, outer = str(options["inner"]), str(options["outer"])
    updates = expected_updates(config)
    least, most = NEEDS[outer][1], updates // NEEDS[inner][1]
    if most < max(2, least):
        yield Misfit(
            "hierarchical.inner",
            f'is {inner}, below {outer}: too much for {updates} updates a round. Write "mean", or more clients.',
        )
    elif not least <= groups <= most:
        yield Misfit(
            "hierarchical.groups",
            f"are {groups}, but {inner} below {outer} goes with {max(2, least)} to {most} of {updates} updates "
            f"a round. Write {least if groups < least else most}.",
        )
    else:
        yield from _misfits(inner, f, updates // groups, "updates in the smallest group")
        yield from _misfits(outer, f, groups, "groups")


def _misfits(rule: str, f: int, there: int, of: str) -> Iterator[Misfit]:
    each, more = NEEDS[rule]
    if there < each * f + more:
        most = (there - more) // each
        text = f"is {f}, for which {rule} needs {each * f + more}, but has {there} {of}."
        yield Misfit("hierarchical.f", f"{text} Write {most}{' or less' if most else ''}.")


def _apply_rule(rule: str, rows: Tensor, weights: Tensor, f: int) -> tuple[Tensor, Sequence[int]]:
    options: Mapping[str, Any] = {F[rule]: f} if rule in F else {}
    try:
        return parts.aggregation(rule).combine(rows, weights, **options)
    except TooFewUpdates as few:
        raise TooFewUpdates(f"{rule} of one group: {few}") from None
