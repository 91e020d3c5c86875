"""What clients send of their updates: each passes through the run's filters, one after the other, and back.

The engine goes on with what a server would make of the bytes, never with what the client had. What a filter keeps of a
client lies with everything that clients keep (Server.kept): in every checkpoint, and on the client's home rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from training.config.choices import Value
from training.federated.schedule import STACKED_NUMBERS, Ids
from training.federation import parts, random_streams
from training.federation.config import FederationConfig
from training.federation.filter_order import UPDATE
from training.federation.parts import Filter
from training.runtime.seeds import derive_seed

if TYPE_CHECKING:
    from training.federated.client_tasks import Sent


@dataclass(frozen=True)
class Passing:
    """What a filter knows of the rows that pass through it, a client's each."""

    clients: Ids
    round: int
    seed: int
    """The run's, of which `generator` makes others."""
    numbers: int
    """In a row that it is given."""
    dtype: torch.dtype
    """Of such a row."""
    kept: Mapping[str, Tensor]
    """(clients, …) by the names in the filter's `begin`."""

    def generator(self, *more: int) -> torch.Generator:
        """Random numbers of this round, the same wherever they are asked for: on the CPU, whatever the device."""
        return torch.Generator().manual_seed(derive_seed(self.seed, random_streams.FILTER, self.round, *more))


@dataclass(frozen=True)
class Passed:
    """Updates, as they have been sent."""

    rows: Tensor
    """(clients, numbers), as the server has them."""
    wire: dict[str, Tensor]
    """(clients, …) by name: what a message holds in their place."""
    kept: dict[str, Tensor]
    """(clients, …) by name, from now on."""


@dataclass(frozen=True)
class _Stage:
    name: str
    filter: Filter
    options: Mapping[str, Value]
    numbers: int
    dtype: torch.dtype
    begun: Mapping[str, Tensor]

    def kept_as(self, name: str) -> str:
        return f"{self.name}_{name}"

    def sent_as(self, name: str) -> str:
        return f"{UPDATE}.{self.name}.{name}"


class Chain:
    """The filters of a run, in order."""

    def __init__(self, config: FederationConfig, numbers: int, dtype: torch.dtype) -> None:
        """`numbers`: of an update."""
        self._seed = config.seed
        self._stages: list[_Stage] = []
        row = torch.zeros(1, numbers, dtype=dtype)
        for name in config.filters:
            found, options = parts.filter_(name), config.options_of(name)
            begun = found.begin(row[0], **options)
            self._stages.append(_Stage(name, found, options, row.shape[1], row.dtype, begun))
            row, _ = self._send(self._stages[-1], row, np.zeros(1, dtype=np.int64), 0, self.begin(1))

    @property
    def keeps(self) -> frozenset[str]:
        """The names of what is kept."""
        return frozenset(stage.kept_as(name) for stage in self._stages for name in stage.begun)

    def begin(self, clients: int, device: torch.device | None = None) -> dict[str, Tensor]:
        """What is kept of each client before its first round, (clients, …) by name."""
        return {
            stage.kept_as(name): value.to(device).expand(clients, *value.shape).clone()
            for stage in self._stages
            for name, value in stage.begun.items()
        }

    def passed(self, sent: Sent, round_: int, kept: Mapping[str, Tensor]) -> Sent:
        """What clients have sent, once their updates have passed through. `kept`: of these clients."""
        sent.kept |= kept
        if self._stages and UPDATE in sent.values:  # where all of them have failed, it is not
            passed = self.through(sent.wire.pop(UPDATE), sent.clients, round_, kept)
            sent.values[UPDATE] = passed.rows
            sent.wire |= passed.wire
            sent.kept |= passed.kept
        return sent

    def through(self, rows: Tensor, clients: Ids, round_: int, kept: Mapping[str, Tensor]) -> Passed:
        """What comes of these clients' updates, (clients, numbers). `kept`: (clients, …), theirs.

        So many at a time as hold what a chunk may hold: where clients are computed one by one, they are large.
        """
        most = max(1, STACKED_NUMBERS // max(1, rows.shape[1]))
        pieces = []
        for begin in range(0, len(rows), most):
            some = slice(begin, begin + most)
            own = {name: values[some] for name, values in kept.items()}
            pieces.append(self._through(rows[some], clients[some], round_, own))
        if len(pieces) == 1:
            return pieces[0]
        return Passed(
            torch.cat([piece.rows for piece in pieces]),
            {name: torch.cat([piece.wire[name] for piece in pieces]) for name in pieces[0].wire},
            {name: torch.cat([piece.kept[name] for piece in pieces]) for name in pieces[0].kept},
        )

    def receive(self, wire: Mapping[str, Tensor], clients: Ids, round_: int, kept: Mapping[str, Tensor]) -> Tensor:
        """The updates (clients, numbers), from what came in their place. `kept`: as it was before this round.

        ValueError for what no client of ours would send.
        """
        return self._received(wire, clients, round_, kept)[0]

    def _through(self, rows: Tensor, clients: Ids, round_: int, kept: Mapping[str, Tensor]) -> Passed:
        wire: dict[str, Tensor] = {}
        given = [rows]
        for stage in self._stages:
            values, beside = self._send(stage, given[-1], clients, round_, kept)
            given.append(values)
            wire |= {stage.sent_as(name): value for name, value in beside.items()}
        wire = {UPDATE: given[-1], **wire}
        received = self._received(wire, clients, round_, kept)
        after: dict[str, Tensor] = {}
        for stage, was, came in zip(self._stages, given, received, strict=False):
            own = stage.filter.keep(was, came, self._passing(stage, clients, round_, kept), **stage.options)
            after |= {stage.kept_as(name): value for name, value in own.items()}
        return Passed(received[0], wire, after)

    def _send(
        self, stage: _Stage, given: Tensor, clients: Ids, round_: int, kept: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return stage.filter.send(given, self._passing(stage, clients, round_, kept), **stage.options)

    def _received(
        self, wire: Mapping[str, Tensor], clients: Ids, round_: int, kept: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """What each filter takes to have been given, from the first on; at the end what came."""
        found = [wire[UPDATE]]
        for stage in reversed(self._stages):
            prefix = stage.sent_as("")
            beside = {name.removeprefix(prefix): value for name, value in wire.items() if name.startswith(prefix)}
            passing = self._passing(stage, clients, round_, kept)
            found.append(stage.filter.receive(found[-1], beside, passing, **stage.options))
        return found[::-1]

    def _passing(self, stage: _Stage, clients: Ids, round_: int, kept: Mapping[str, Tensor]) -> Passing:
        own = {name: kept[stage.kept_as(name)] for name in stage.begun}
        return Passing(clients, round_, self._seed, stage.numbers, stage.dtype, own)
