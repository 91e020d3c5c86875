"""Sums that come out the same, bit for bit, on any number of ranks.

A chunk's weighted sum is taken in float64, client after client; the chunks' are added up along a fixed binary tree.
Ranks hold contiguous ranges of chunks and hand over whole subtrees, so the additions are the same ones wherever they
are done. (A plain all-reduce of the ranks' sums gave six results on 1, 2, 3, 4, 5 and 8 ranks.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

BLOCK = 2**18
"""Numbers that are brought to float64 at a time: they stay in the cache, whole tensors took six times as long."""
Node = tuple[int, int]
"""(first chunk, chunks that it would have if the tree were full), a power of two."""


def add_weighted(total: Tensor, rows: Tensor, weights: Tensor) -> None:
    """total += Σ weights[i] · rows[i], in float64. `total` (numbers,) float64, `rows` (clients, numbers)."""
    for where, part in _weighted(rows, weights):
        total[where].add_(part)


def _put(value: Tensor, rows: Tensor, weights: Tensor, others: Sequence[Tensor]) -> None:
    """value = Σ weights[i] · rows[i] + Σ others, of which `value` is the last if there are any.

    Block by block all the way up: each number is fetched and put back once. In memory that is there already, as new
    memory costs more than what is written to it.
    """
    for where, part in _weighted(rows, weights):
        for other in others[:-1]:
            part.add_(other[where])
        if others:
            value[where].add_(part)
        else:
            value[where] = part


def _weighted(rows: Tensor, weights: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The weighted sum in float64, a block after the other; each is good until the next."""
    clients, numbers = rows.shape
    width = max(1, BLOCK // max(1, clients))
    room = _empty(min(width, numbers), rows.device)
    for begin in range(0, numbers, width):
        where = slice(begin, min(begin + width, numbers))
        part = room[: where.stop - begin]
        if clients == 1:
            part.copy_(rows[0, where]).mul_(weights[0])
        else:
            torch.mv(rows[:, where].double().T, weights, out=part)
        yield where, part


Part = tuple[Tensor, Tensor]
"""Rows (clients, numbers) of a chunk, and each client's weight (clients,)."""


class Tree:
    """Adds up what is under each node as soon as both halves are there, so that few of them are held at a time."""

    def __init__(self, of: int) -> None:
        self._of = of
        self._nodes: dict[Node, Tensor] = {}
        self._free: list[Tensor] = []
        """Of nodes that are no more."""

    def put(self, node: Node, value: Tensor) -> None:
        """Takes over `value`, which is changed."""
        others, node = self._above(node)
        for other in others:
            value.add_(other)
        self._nodes[node] = value

    def put_sum(self, chunk: int, parts: Sequence[Part], device: torch.device) -> None:
        """A chunk's weighted sum, part after part, with all that it completes."""
        others, node = self._above((chunk, 1))
        numbers = sum(rows.shape[1] for rows, _ in parts)
        value = others[-1] if others else self._free.pop() if self._free else _empty(numbers, device)
        begin = 0
        for rows, weights in parts:
            end = begin + rows.shape[1]
            _put(value[begin:end], rows, weights, [other[begin:end] for other in others])
            begin = end
        self._free += others[:-1]
        self._nodes[node] = value

    def _above(self, node: Node) -> tuple[list[Tensor], Node]:
        """The nodes that this one completes, taken out, from below; and that which they make together."""
        begin, size = node
        found = []
        while size < self._of:
            is_left = begin % (2 * size) == 0
            if not (is_left and begin + size >= self._of):  # else there is no other half
                other = self._nodes.pop((begin + size if is_left else begin - size, size), None)
                if other is None:
                    break
                found.append(other)
            begin, size = (begin if is_left else begin - size), 2 * size
        return found, (begin, size)

    def nodes(self) -> Iterator[tuple[Node, Tensor]]:
        """What is left, in order: of all chunks one node, the root."""
        yield from sorted(self._nodes.items())

    @property
    def root(self) -> Tensor:
        ((_, value),) = self._nodes.items()
        return value


def subtrees(chunks: range, of: int) -> list[Node]:
    """The nodes that are left once all chunks of this range, of so many, are put into a tree."""
    tree = Tree(of)
    for chunk in chunks:
        tree.put((chunk, 1), torch.zeros(0))
    return [node for node, _ in tree.nodes()]


def split(total: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The parts of (…, numbers) by the names of what was sent."""
    return dict(zip(sizes, torch.split(total, list(sizes.values()), dim=-1), strict=True))


def whole(tree_of: int, parts: Mapping[Node, Tensor]) -> Tensor:
    """The root from the nodes that all ranks hold."""
    tree = Tree(tree_of)
    for node, value in sorted(parts.items()):
        tree.put(node, value)
    return tree.root


def zeros(numbers: int, device: torch.device) -> Tensor:
    return torch.zeros(numbers, dtype=torch.float64, device=device)


def _empty(numbers: int, device: torch.device) -> Tensor:
    return torch.empty(numbers, dtype=torch.float64, device=device)
