"""Clients by groups, each brought together by itself, then the groups (Liu et al., 2020, arXiv 1905.06641)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from training.config.shape import Misfit
from training.federated.aggregation._robust import need, waited_for
from training.federation import parts
from training.federation.parts import TooFew

if TYPE_CHECKING:
    from torch import Tensor

    from training.federation.config import FederationConfig

NEEDS = {"mean": (0, 1), "norm_clipping": (0, 1), "median": (2, 1), "trimmed_mean": (2, 1), "krum": (2, 3)}
"""(each, more): f bad ones among so many that each · f + more of them are needed."""
F = {"median": "f", "trimmed_mean": "trim", "krum": "f"}
"""Under which name a rule takes f."""


def combine(
    rows: Tensor,
    weights: Tensor,
    *,
    groups: Annotated[int, "2..10000", "A round's clients are cut into so many, of neighbouring numbers."] = 2,
    inner: Annotated[
        Literal["mean", "median", "trimmed_mean", "krum", "norm_clipping"], "How a group's updates become one."
    ] = "mean",
    outer: Annotated[
        Literal["mean", "median", "trimmed_mean", "krum", "norm_clipping"], "How the groups' become one."
    ] = "median",
    f: Annotated[int, "0..50000", "Bad clients of a group, and bad groups, that the rules shall bear."] = 0,
) -> tuple[Tensor, Sequence[int]]:
    """A group weighs what those of its clients weigh that count."""
    import torch

    need(rows, groups)
    parts = torch.arange(len(rows)).tensor_split(groups)
    found = [_one(inner, rows[part], weights[part], f) for part in parts]
    left_out = [int(part[place]) for part, (_, out) in zip(parts, found, strict=True) for place in out]
    weight = weights.clone()
    weight[left_out] = 0
    heavy = torch.stack([weight[part].sum() for part in parts])
    combined, bad = _one(outer, torch.stack([row for row, _ in found]), heavy, f)
    away = {int(client) for group in bad for client in parts[group]}
    return combined, sorted(away | set(left_out))


def check(config: FederationConfig) -> Iterator[Misfit]:
    options = config.options_of("hierarchical")
    groups, f = int(options["groups"] or 0), int(options["f"] or 0)
    inner, outer = str(options["inner"]), str(options["outer"])
    updates = waited_for(config)
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


def _one(rule: str, rows: Tensor, weights: Tensor, f: int) -> tuple[Tensor, Sequence[int]]:
    options: Mapping[str, Any] = {F[rule]: f} if rule in F else {}
    try:
        return parts.aggregation(rule).combine(rows, weights, **options)
    except TooFew as few:
        raise TooFew(f"{rule} of one group: {few}") from None
