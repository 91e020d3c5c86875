"""Exchange between the ranks of one allocation, over which the clients are divided."""

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
class RowMove:
    """Rows of some clients that one rank sends to another, or to itself."""

    source: int
    target: int
    clients: Ids


def exchange(world: World) -> RankExchange:
    return RankExchange(world)


class RankExchange:
    """Sends values between ranks. All ranks call the same methods in the same order."""

    def __init__(self, world: World) -> None:
        self._world = world

    def tree_sum(self, tree: Tree, shares: Sequence[range], chunks: int, size: int) -> Tensor:
        """Return the sum over all chunks, (size,) float64, equal on every rank.

        `shares`: the chunks of each rank.
        """
        if self._world.size == 1:
            return tree.root
        local = dict(tree.nodes())
        whole = sums.zeros(size, self._world.device)
        if self._world.leads:
            parts = dict(local)
            for rank, share in enumerate(shares[1:], start=1):
                for node in sums.subtrees(share, chunks):
                    parts[node] = sums.zeros(size, self._world.device)
                    dist.recv(parts[node], src=rank)
            whole = sums.root_of(chunks, parts)
        else:
            for value in local.values():
                dist.send(value, dst=0)
        dist.broadcast(whole, src=0)
        return whole

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the small plain value of each rank, by rank."""
        return gather(self._world, value)

    def gather_rows(
        self, local: Mapping[str, Tensor], counts: Sequence[int], like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the rows of all ranks, (clients, …) by name, in the order of the ranks.

        `counts`: the number of rows of each rank. `like`: one row (…,) by name, for the dtype and device.
        """
        if self._world.size == 1:
            return dict(local)
        return {
            name: torch.cat(list(self._rows_by_rank(local.get(name), counts, value))) for name, value in like.items()
        }

    def move_rows(
        self,
        moves: Iterable[RowMove],
        *,
        read: Callable[[Ids], Tensor],
        write: Callable[[Ids, Tensor], None],
        like: Tensor,
    ) -> None:
        """Send rows from rank to rank, one message after the other, so that it takes memory for one message.

        `moves`: equal on every rank, in the same order: otherwise two ranks could wait for each other. `read`:
        (clients) → their rows (clients, …) on the source. `write`: stores them on the target. `like`: one row (…,).
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

    def _rows_by_rank(self, local: Tensor | None, counts: Sequence[int], like: Tensor) -> Iterable[Tensor]:
        for rank, count in enumerate(counts):
            if count == 0:
                continue
            if rank == self._world.rank:
                assert local is not None
                rows = local.contiguous()
            else:
                rows = like.new_empty(count, *like.shape)
            dist.broadcast(rows, src=rank)
            yield rows
