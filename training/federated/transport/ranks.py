"""Clients are shared out over the ranks of one allocation; what they send is added up where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.federated import sums
from training.federated.schedule import Ids
from training.federated.sums import Tree
from training.runtime.distributed import World, gather


@dataclass(frozen=True)
class Move:
    """Rows of some clients that one rank gives another, or itself."""

    source: int
    target: int
    clients: Ids


def exchange(world: World) -> Ranks:
    return Ranks(world)


class Ranks:
    """What one rank gives the others, and has from them. All call each of its functions, in the same order."""

    def __init__(self, world: World) -> None:
        self._world = world

    def total(self, tree: Tree, shares: Sequence[range], chunks: int, numbers: int) -> Tensor:
        """The sum over all chunks, (numbers,) float64, the same on every rank. `shares`: the chunks of each."""
        if self._world.size == 1:
            return tree.root
        mine = dict(tree.nodes())
        whole = sums.zeros(numbers, self._world.device)
        if self._world.leads:
            parts = dict(mine)
            for rank, share in enumerate(shares[1:], start=1):
                for node in sums.subtrees(share, chunks):
                    parts[node] = sums.zeros(numbers, self._world.device)
                    dist.recv(parts[node], src=rank)
            whole = sums.whole(chunks, parts)
        else:
            for value in mine.values():
                dist.send(value, dst=0)
        dist.broadcast(whole, src=0)
        return whole

    def facts(self, mine: Any) -> list[Any]:
        """What each rank has to tell of its clients, small plain things, by rank."""
        return gather(self._world, mine)

    def rows(self, mine: Mapping[str, Tensor], counts: Sequence[int], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(clients of all ranks, …) by name, in the order of the ranks. `counts`: of the rows of each.

        `like`: (…,) by name, where this rank has none of its own.
        """
        if self._world.size == 1:
            return dict(mine)
        return {name: torch.cat(list(self._each(mine.get(name), counts, value))) for name, value in like.items()}

    def move(
        self,
        moves: Iterable[Move],
        *,
        read: Callable[[Ids], Tensor],
        write: Callable[[Ids, Tensor], None],
        like: Tensor,
    ) -> None:
        """Bring rows from rank to rank, one message after the other, so that memory for one is all that it takes.

        `moves`: the same on every rank; their order, too, is what keeps two ranks from waiting for each other.
        `read`: (clients) → their rows (clients, …) on the source; `write`: takes them on the target; `like`: (…,).
        """
        rank = self._world.rank
        for move in moves:
            if move.source == move.target == rank:
                write(move.clients, read(move.clients))
            elif move.source == rank:
                dist.send(read(move.clients).contiguous(), dst=move.target)
            elif move.target == rank:
                rows = like.new_empty(len(move.clients), *like.shape)
                dist.recv(rows, src=move.source)
                write(move.clients, rows)

    def _each(self, mine: Tensor | None, counts: Sequence[int], like: Tensor) -> Iterable[Tensor]:
        for rank, count in enumerate(counts):
            if count == 0:
                continue
            if rank == self._world.rank:
                assert mine is not None
                rows = mine.contiguous()
            else:
                rows = like.new_empty(count, *like.shape)
            dist.broadcast(rows, src=rank)
            yield rows
