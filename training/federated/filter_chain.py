"""Pass updates through the run's filters, in order, and decode them again as the server would.

The engine continues with what a server decodes from the bytes, never with what the client had. A filter's state of a
client is stored with the rest of the client's state (Server.client_state): in each checkpoint, and on its home rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from training.config.choices import Value
from training.federated.filter_context import FilterContext
from training.federated.schedule import CHUNK_PARAMETERS, Ids
from training.federation import parts
from training.federation.config import FederationConfig
from training.federation.filter_order import UPDATE
from training.federation.parts import Filter

if TYPE_CHECKING:
    from training.federated.client_tasks import ClientUpdates


@dataclass(frozen=True)
class FilteredUpdates:
    """Updates after all filters."""

    rows: Tensor
    """(clients, size), as the server decodes them."""
    wire: dict[str, Tensor]
    """(clients, …) by name: what the messages hold in place of the updates."""
    state: dict[str, Tensor]
    """The clients' new state, (clients, …) by name."""


@dataclass(frozen=True)
class _Stage:
    name: str
    filter: Filter
    options: Mapping[str, Value]
    size: int
    dtype: torch.dtype
    initial: Mapping[str, Tensor]

    def state_key(self, name: str) -> str:
        return f"{self.name}_{name}"

    def wire_key(self, name: str) -> str:
        return f"{UPDATE}.{self.name}.{name}"


class FilterChain:
    """The filters of a run, in their order."""

    def __init__(self, config: FederationConfig, size: int, dtype: torch.dtype) -> None:
        """`size`: the number of parameters in an update."""
        self._seed = config.seed
        self._stages: list[_Stage] = []
        row = torch.zeros(1, size, dtype=dtype)
        for name in config.filters:
            found, options = parts.filter_(name), config.options_of(name)
            initial = found.begin(row[0], **options)
            self._stages.append(_Stage(name, found, options, row.shape[1], row.dtype, initial))
            row, _ = self._send(self._stages[-1], row, np.zeros(1, dtype=np.int64), 0, self.begin(1))

    @property
    def state_names(self) -> frozenset[str]:
        """Return the names of the clients' state that belongs to filters."""
        return frozenset(stage.state_key(name) for stage in self._stages for name in stage.initial)

    def begin(self, clients: int, device: torch.device | None = None) -> dict[str, Tensor]:
        """Return the state of each client before its first round, (clients, …) by name."""
        return {
            stage.state_key(name): value.to(device).expand(clients, *value.shape).clone()
            for stage in self._stages
            for name, value in stage.initial.items()
        }

    def apply(self, updates: ClientUpdates, round_: int, state: Mapping[str, Tensor]) -> ClientUpdates:
        """Replace the updates by what the server decodes after all filters. `state`: that of these clients."""
        updates.state |= state
        if self._stages and UPDATE in updates.values:  # no update where all of them failed
            passed = self.transform(updates.wire.pop(UPDATE), updates.clients, round_, state)
            updates.values[UPDATE] = passed.rows
            updates.wire |= passed.wire
            updates.state |= passed.state
        return updates

    def transform(self, rows: Tensor, clients: Ids, round_: int, state: Mapping[str, Tensor]) -> FilteredUpdates:
        """Filter these clients' updates (clients, size). `state` (clients, …): theirs.

        At most CHUNK_PARAMETERS values at a time: the updates of clients that are computed one by one are large.
        """
        most = max(1, CHUNK_PARAMETERS // max(1, rows.shape[1]))
        pieces = []
        for begin in range(0, len(rows), most):
            some = slice(begin, begin + most)
            part_state = {name: values[some] for name, values in state.items()}
            pieces.append(self._transform(rows[some], clients[some], round_, part_state))
        if len(pieces) == 1:
            return pieces[0]
        return FilteredUpdates(
            torch.cat([piece.rows for piece in pieces]),
            {name: torch.cat([piece.wire[name] for piece in pieces]) for name in pieces[0].wire},
            {name: torch.cat([piece.state[name] for piece in pieces]) for name in pieces[0].state},
        )

    def receive(self, wire: Mapping[str, Tensor], clients: Ids, round_: int, state: Mapping[str, Tensor]) -> Tensor:
        """Decode the updates (clients, size) from messages, which nothing sends yet (training.federated.messages).

        `state`: the clients' state before this round. ValueError for what `send` would never have produced.
        """
        return self._received(wire, clients, round_, state)[0]

    def _transform(self, rows: Tensor, clients: Ids, round_: int, state: Mapping[str, Tensor]) -> FilteredUpdates:
        wire: dict[str, Tensor] = {}
        given = [rows]
        for stage in self._stages:
            values, extras = self._send(stage, given[-1], clients, round_, state)
            given.append(values)
            wire |= {stage.wire_key(name): value for name, value in extras.items()}
        wire = {UPDATE: given[-1], **wire}
        received = self._received(wire, clients, round_, state)
        after: dict[str, Tensor] = {}
        for stage, was, came in zip(self._stages, given, received, strict=False):
            new_state = stage.filter.keep(was, came, self._context(stage, clients, round_, state), **stage.options)
            after |= {stage.state_key(name): value for name, value in new_state.items()}
        return FilteredUpdates(received[0], wire, after)

    def _send(
        self, stage: _Stage, given: Tensor, clients: Ids, round_: int, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return stage.filter.send(given, self._context(stage, clients, round_, state), **stage.options)

    def _received(
        self, wire: Mapping[str, Tensor], clients: Ids, round_: int, state: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """Return what the server decodes at each filter, from the first on, and at the end what arrived."""
        found = [wire[UPDATE]]
        for stage in reversed(self._stages):
            prefix = stage.wire_key("")
            extras = {name.removeprefix(prefix): value for name, value in wire.items() if name.startswith(prefix)}
            context = self._context(stage, clients, round_, state)
            found.append(stage.filter.receive(found[-1], extras, context, **stage.options))
        return found[::-1]

    def _context(self, stage: _Stage, clients: Ids, round_: int, state: Mapping[str, Tensor]) -> FilterContext:
        stage_state = {name: state[stage.state_key(name)] for name in stage.initial}
        return FilterContext(clients, round_, self._seed, stage.size, stage.dtype, stage_state)
