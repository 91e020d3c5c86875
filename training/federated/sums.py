"""Compute sums that are equal bit for bit on any number of ranks.

A chunk's weighted sum is taken in float64, client after client; the sums of chunks are added along a fixed binary tree.
Ranks hold contiguous ranges of chunks and send whole subtrees, so the additions are the same ones wherever they are
done. (A plain all-reduce of the ranks' sums gave six different results on 1, 2, 3, 4, 5 and 8 ranks.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

BLOCK = 2**18
"""Values that are converted to float64 at a time: they stay in the cache; whole tensors took six times as long."""
Node = tuple[int, int]
"""(first chunk, number of chunks below it if the tree were full: a power of two)."""


def add_weighted(total: Tensor, rows: Tensor, weights: Tensor) -> None:
    """Add Σ weights[i] · rows[i] to `total` (size,) in float64. `rows`: (clients, size)."""
    for where, part in _weighted(rows, weights):
        total[where].add_(part)


def _store_sum(value: Tensor, rows: Tensor, weights: Tensor, others: Sequence[Tensor]) -> None:
    """Write Σ weights[i] · rows[i] + Σ others into `value`, which is the last of the others if there are any.

    It goes block by block, so that each value is loaded and stored once, in memory that exists already: allocating new
    memory costs more than writing to it.
    """
    for where, part in _weighted(rows, weights):
        for other in others[:-1]:
            part.add_(other[where])
        if others:
            value[where].add_(part)
        else:
            value[where] = part


def _weighted(rows: Tensor, weights: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the weighted sum in float64 block by block, with its place. Each block is overwritten by the next."""
    clients, size = rows.shape
    width = max(1, BLOCK // max(1, clients))
    buffer = _empty(min(width, size), rows.device)
    for begin in range(0, size, width):
        where = slice(begin, min(begin + width, size))
        part = buffer[: where.stop - begin]
        if clients == 1:
            part.copy_(rows[0, where]).mul_(weights[0])
        else:
            torch.mv(rows[:, where].double().T, weights, out=part)
        yield where, part


Part = tuple[Tensor, Tensor]
"""The rows (clients, size) of a chunk, and the weight of each client (clients,)."""


class Tree:
    """Adds two siblings as soon as both are there, so that few nodes are in memory at a time."""

    def __init__(self, chunk_count: int) -> None:
        """`chunk_count`: the number of all chunks."""
        self._chunk_count = chunk_count
        self._nodes: dict[Node, Tensor] = {}
        self._free: list[Tensor] = []
        """Memory of nodes that have been added to others."""

    def put(self, node: Node, value: Tensor) -> None:
        """Add a node. The tree takes ownership of `value`, and changes it."""
        others, node = self._above(node)
        for other in others:
            value.add_(other)
        self._nodes[node] = value

    def put_sum(self, chunk: int, parts: Sequence[Part], device: torch.device) -> None:
        """Add a chunk's weighted sum, part after part, and every node that it completes."""
        others, node = self._above((chunk, 1))
        size = sum(rows.shape[1] for rows, _ in parts)
        value = others[-1] if others else self._free.pop() if self._free else _empty(size, device)
        begin = 0
        for rows, weights in parts:
            end = begin + rows.shape[1]
            _store_sum(value[begin:end], rows, weights, [other[begin:end] for other in others])
            begin = end
        self._free += others[:-1]
        self._nodes[node] = value

    def _above(self, node: Node) -> tuple[list[Tensor], Node]:
        """Remove the siblings that this node completes, lowest first. Return them, and the node that they add up to."""
        begin, size = node
        found = []
        while size < self._chunk_count:
            is_left = begin % (2 * size) == 0
            if not (is_left and begin + size >= self._chunk_count):  # else it has no sibling
                other = self._nodes.pop((begin + size if is_left else begin - size, size), None)
                if other is None:
                    break
                found.append(other)
            begin, size = (begin if is_left else begin - size), 2 * size
        return found, (begin, size)

    def nodes(self) -> Iterator[tuple[Node, Tensor]]:
        """Yield the remaining nodes in order: the root alone, once all chunks are there."""
        yield from sorted(self._nodes.items())

    @property
    def root(self) -> Tensor:
        ((_, value),) = self._nodes.items()
        return value


def subtrees(chunks: range, chunk_count: int) -> list[Node]:
    """Return the nodes that remain once the chunks of this range, of `chunk_count` in all, are added to a tree."""
    tree = Tree(chunk_count)
    for chunk in chunks:
        tree.put((chunk, 1), torch.zeros(0))
    return [node for node, _ in tree.nodes()]


def split(total: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Split a vector (…, size) into views by name, in the order of `sizes`."""
    return dict(zip(sizes, torch.split(total, list(sizes.values()), dim=-1), strict=True))


def root_of(chunk_count: int, parts: Mapping[Node, Tensor]) -> Tensor:
    """Return the root, given the remaining nodes of all ranks."""
    tree = Tree(chunk_count)
    for node, value in sorted(parts.items()):
        tree.put(node, value)
    return tree.root


def zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.float64, device=device)


def _empty(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.float64, device=device)
