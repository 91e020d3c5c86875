"""The state that each client keeps from round to round, stored once and divided over the ranks by client.

Rank r stores an even, contiguous share of all clients, its home rows. Which clients a rank computes follows from the
round (schedule.shares). So a round on several ranks

    borrow         brings the rows of this round's clients to the rank that computes them
    rows_of, put   read and change them there
    commit         brings them home

and a round without a quorum ends with `release` alone: nothing has changed. One rank borrows from itself without a
copy: `put` changes the home rows at once where the round is certain to count, and defers new values until it is.

Rows have the model's dtype. A coarser one would break what the algorithms rely on: in bfloat16 the mean of the clients'
control variates would be off the server's by 4e-3 of its size, in float32 by 1e-7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from training.checkpoint.rows import Rows
from training.federated.schedule import Ids
from training.federated.transport.ranks import RankExchange, RowMove
from training.runtime.distributed import World

BLOCK_BYTES = 1 << 20
"""Sent to another rank in one message: the exchange takes memory for one message in addition to the rows."""


class ClientState(Mapping[str, Tensor]):
    """The home rows (clients, …) of this rank by name: on one rank those of all clients."""

    def __init__(self, clients: int, world: World) -> None:
        self.clients, self._world = clients, world
        self._share = -(-clients // world.size)
        """Clients of a rank, as torch.chunk and DTensor's Shard divide them; the last ones may have fewer or none."""
        self._exchange = RankExchange(world)
        self._initial: dict[str, Tensor] = {}
        self._rows: dict[str, Rows] = {}
        self._borrowed: dict[str, Tensor] = {}
        self._lists: Sequence[Ids] = ()
        """The clients that each rank computes in this round."""
        self._order: Ids = np.zeros(0, dtype=np.int64)
        """Places of this rank's borrowed rows in order of their clients."""
        self._deferred: list[tuple[Ids, Mapping[str, Tensor]]] = []

    @property
    def home(self) -> range:
        """Return the clients whose rows are stored on this rank."""
        begin = min(self.clients, self._share * self._world.rank)
        return range(begin, min(self.clients, begin + self._share))

    # The home rows by name.

    def __getitem__(self, name: str) -> Tensor:
        return self._rows[name].tensor

    def __setitem__(self, name: str, rows: Tensor) -> None:
        self._rows[name] = Rows(rows, first=self.home.start, total=self.clients)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def initialize(self, initial: Mapping[str, Tensor]) -> None:
        """Give every client the same values (…) by name, before its first round."""
        for name, value in initial.items():
            self._initial[name] = value.clone()
            self[name] = value.expand(len(self.home), *value.shape).clone()

    def initial_rows(self, clients: int) -> dict[str, Tensor]:
        """Return the initial state of this number of clients, (clients, …) by name."""
        return {name: value.expand(clients, *value.shape).clone() for name, value in self._initial.items()}

    def home_rows(self, clients: Ids) -> dict[str, Tensor]:
        """Return copies of rows that are at home on this rank, (clients, …) by name, in this order."""
        where = torch.from_numpy(clients - self.home.start)
        return {name: rows.tensor[where.to(rows.tensor.device)] for name, rows in self._rows.items()}

    def whole(self, name: str) -> Tensor:
        """Return the rows of all clients on every rank. All ranks call it; it takes the memory that dividing saves."""
        counts = [len(range(self.clients)[self._share * rank :][: self._share]) for rank in range(self._world.size)]
        return self._exchange.gather_rows({name: self[name]}, counts, {name: self._initial[name]})[name]

    # Checkpoints.

    def saved_rows(self) -> dict[str, Rows]:
        """Return the home rows as a save takes them."""
        return dict(self._rows)

    def restored_tensors(self) -> dict[str, Tensor]:
        """Return the home rows as a checkpoint is read into them: on several ranks each reads its own alone."""
        if self._world.size == 1 or not self._rows:
            return dict(self)
        # Imported late: it takes most of a second, and a run without client state needs none of it.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh(self._world.device.type, (self._world.size,))
        return {
            name: DTensor.from_local(
                tensor, mesh, [Shard(0)], run_check=False, shape=self._rows[name].shape, stride=tensor.stride()
            )
            for name, tensor in self.items()
        }

    # A round.

    def borrow(self, clients_by_rank: Sequence[Ids]) -> None:
        """Bring each rank the rows of the clients that it works on. All ranks call it.

        `clients_by_rank`: the clients of the first ranks; the remaining ranks work on none.
        """
        self.release()
        if self._world.size == 1 or not self._rows:
            return
        nobody = np.zeros(0, dtype=np.int64)
        self._lists = [*clients_by_rank, *[nobody] * (self._world.size - len(clients_by_rank))]
        clients = self._lists[self._world.rank]
        self._order = np.argsort(clients, kind="stable")
        for name, rows in self._rows.items():
            self._borrowed[name] = rows.tensor.new_empty(len(clients), *rows.shape[1:])
            self._bring(name, rows)

    def rows_of(self, clients: Ids) -> dict[str, Tensor]:
        """Return copies of the rows of clients that this rank works on, (clients, …) by name."""
        if not self._lists:
            return self.home_rows(clients)
        where = self._places(clients)
        return {name: values[where.to(values.device)] for name, values in self._borrowed.items()}

    def put(self, clients: Ids, values: Mapping[str, Tensor], *, is_certain: bool) -> None:
        """Replace the rows of clients that this rank works on. `is_certain`: the round counts, whatever comes."""
        if self._lists:
            for name in self._rows:
                self._put(name, clients, values[name])
            return
        self._deferred.append((clients, values))
        if is_certain:
            self._write_deferred()

    def commit(self) -> None:
        """Make what was `put` the clients' state. All ranks call it."""
        self._write_deferred()
        if self._lists:
            for name, rows in self._rows.items():
                self._bring_home(name, rows)

    def release(self) -> None:
        """Free what was borrowed, and forget what was put since the last commit."""
        self._borrowed, self._lists, self._deferred = {}, (), []

    def _bring(self, name: str, rows: Rows) -> None:
        self._exchange.move_rows(
            self._moves(name, outward=True),
            read=lambda clients: rows.tensor[self._at_home(clients)],
            write=lambda clients, values: self._put(name, clients, values),
            like=self._initial[name],
        )

    def _bring_home(self, name: str, rows: Rows) -> None:
        self._exchange.move_rows(
            self._moves(name, outward=False),
            read=lambda clients: self._borrowed[name][self._places(clients)],
            write=lambda clients, values: rows.write(self._at_home(clients), values),
            like=self._initial[name],
        )

    def _write_deferred(self) -> None:
        while self._deferred:
            clients, values = self._deferred.pop(0)
            where = self._at_home(clients)
            for name, rows in self._rows.items():
                rows.write(where, values[name])

    def _put(self, name: str, clients: Ids, values: Tensor) -> None:
        self._borrowed[name][self._places(clients).to(values.device)] = values

    def _at_home(self, clients: Ids) -> Tensor:
        return torch.from_numpy(clients - self.home.start)

    def _places(self, clients: Ids) -> Tensor:
        borrowed = self._lists[self._world.rank]
        return torch.from_numpy(self._order[np.searchsorted(borrowed, clients, sorter=self._order)])

    def _moves(self, name: str, *, outward: bool) -> Iterator[RowMove]:
        """Yield who gives whom which clients' rows, in the same order on every rank. `outward`: from home."""
        rows = self._initial[name]
        most = max(1, BLOCK_BYTES // max(1, rows.nbytes))
        for worker, clients in enumerate(self._lists):
            homes = clients // self._share
            for home in np.unique(homes).tolist():
                moved = clients[homes == home]
                for begin in range(0, len(moved), most):
                    source, target = (home, worker) if outward else (worker, home)
                    yield RowMove(source, target, moved[begin : begin + most])
