"""Simulate attackers among the clients: the labels that they train on, and the updates that they send.

Attacks that need no other client's update are applied client by client, before filters. Colluding ones need all of a
round's updates: each rank then stores those of its clients until all are there, and rank 0 forges and broadcasts,
because different processors round differently. Running statistics, losses and client states stay honest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from training.config.base import ConfigError, Problem
from training.data import Batch, Ids, Split, Task
from training.federated.client_tasks import ClientUpdates
from training.federated.transport.ranks import RankExchange
from training.federation import parts, random_streams
from training.federation.attackers import attackers
from training.federation.config import FederationConfig
from training.federation.data_division import DataDivision
from training.federation.filter_order import UPDATE
from training.runtime.distributed import World
from training.runtime.seeds import derive_seed

SCAN_BATCH = 4096
"""Samples that are read at a time to find the labels that occur."""


@dataclass(frozen=True)
class AttackerKnowledge:
    """The knowledge of attackers besides their own updates, which are in the order of their ids."""

    clients: Ids
    """(attackers,): their ids."""
    round: int
    seed: int
    """The run's seed."""
    honest: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    """(clients, parameters) float64: the updates of all that do not attack, for attacks that COLLUDE."""

    def generator(self, attacker_index: int) -> torch.Generator:
        """Return the random numbers of one attacker in this round, on the CPU whatever the device."""
        seed = derive_seed(self.seed, random_streams.ATTACK, self.round, int(self.clients[attacker_index]))
        return torch.Generator().manual_seed(seed)


class AttackSimulation:
    """Applies a run's attack to the clients' updates."""

    def __init__(self, config: FederationConfig) -> None:
        self._seed = config.seed
        self._attack, self._options = parts.attack(config.attack), config.options_of(config.attack)
        self._attackers = attackers(config)

    @property
    def colludes(self) -> bool:
        return self._attack.COLLUDES

    def forge_independently(self, updates_of_chunk: ClientUpdates, round_: int) -> None:
        """Replace the attackers' updates of a chunk, unless they collude."""
        if self._attack.CHANGES_UPDATES and not self.colludes and UPDATE in updates_of_chunk.values:
            places = np.flatnonzero(self._is_attacker(updates_of_chunk))
            if len(places):
                updates = updates_of_chunk.values[UPDATE][torch.from_numpy(places)].double()
                knowledge = AttackerKnowledge(updates_of_chunk.clients[places], round_, self._seed)
                _replace_updates(updates_of_chunk, places, self._attack.forge(updates, knowledge, **self._options))

    def forge_colluding(
        self, chunks: Sequence[ClientUpdates], clients: Sequence[Ids], round_: int, exchange: RankExchange, world: World
    ) -> None:
        """Replace the attackers' updates of a round.

        `chunks`: the updates of this rank. `clients`: the clients of each rank, in the order of its chunks.
        """
        unusable = {
            client
            for each in exchange.gather_objects([_without_usable_update(updates) for updates in chunks])
            for some in each
            for client in some
        }
        values = [updates.values for updates in chunks]
        sizes = exchange.gather_objects([found[UPDATE].shape[1] for found in values if UPDATE in found])
        size = next((found[0] for found in sizes if found), 0)
        everybody = np.concatenate([np.zeros(0, dtype=np.int64), *clients])
        usable = ~np.isin(everybody, list(unusable))
        attacking = np.sort(everybody[usable & np.isin(everybody, self._attackers)])
        honest = np.sort(everybody[usable & ~np.isin(everybody, self._attackers)])
        if not len(attacking) or not len(honest):
            return
        like = {UPDATE: torch.zeros(size, dtype=torch.float64, device=world.device)}
        local_rows = {UPDATE: torch.cat([_rows(updates, like[UPDATE]) for updates in chunks])} if chunks else {}
        rows = exchange.gather_rows(local_rows, [len(some) for some in clients], like)[UPDATE]
        forged = {}
        if world.leads:
            order = {client: place for place, client in enumerate(everybody.tolist())}
            attacker_rows, honest_rows = ([order[client] for client in some.tolist()] for some in (attacking, honest))
            knowledge = AttackerKnowledge(attacking, round_, self._seed, rows[honest_rows])
            forged = {UPDATE: self._attack.forge(rows[attacker_rows], knowledge, **self._options).contiguous()}
        found = exchange.gather_rows(forged, [len(attacking), *[0] * (world.size - 1)], like)[UPDATE]
        for updates in chunks:
            places = np.flatnonzero(np.isin(updates.clients, attacking))
            if len(places):
                _replace_updates(
                    updates, places, found[torch.from_numpy(np.searchsorted(attacking, updates.clients[places]))]
                )

    def _is_attacker(self, updates: ClientUpdates) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which of a chunk's clients (clients,) attack and have not failed."""
        return np.isin(updates.clients, self._attackers) & ~np.isin(updates.clients, list(updates.failed))


def with_attackers_labels(config: FederationConfig, task: Task, divided: DataDivision) -> Task:
    """Return the task with the labels that attackers train on; ConfigError if samples have no class labels."""
    attack, options = parts.attack(config.attack), config.options_of(config.attack)
    relabel = attack.relabel
    if relabel is None:
        return task
    classes, bad = _classes(config, task), attackers(config)

    def batch(split: Split, ids: Ids) -> Batch:
        found = task.batch(split, ids)
        if split != "train":
            return found
        *inputs, labels = found
        attacks = torch.from_numpy(np.isin(divided.owners[split][ids], bad))
        return *inputs, torch.where(attacks, relabel(labels, classes, **options), labels)

    return replace(task, batch=batch)


def _classes(config: FederationConfig, task: Task) -> Tensor:
    """Return the labels (classes,) of the training samples, ascending."""
    found = np.zeros(0, dtype=np.int64)
    for begin in range(0, task.samples["train"], SCAN_BATCH):
        *inputs, labels = task.batch("train", np.arange(begin, min(begin + SCAN_BATCH, task.samples["train"])))
        if not inputs or labels.dim() != 1 or labels.is_floating_point():
            text = f'is "{config.attack}", but the samples of {config.recipe} have no class labels. Write "sign_flip".'
            raise ConfigError([Problem("run.attack", text)])
        found = np.union1d(found, labels.numpy())
    return torch.from_numpy(found)


def _without_usable_update(updates: ClientUpdates) -> list[int]:
    """Return the clients of a chunk that have sent nothing, or something that is not finite."""
    if UPDATE not in updates.values:
        return [int(client) for client in updates.clients]
    finite = torch.isfinite(updates.values[UPDATE]).all(dim=1).cpu().numpy()
    bad = ~finite | np.isin(updates.clients, list(updates.failed))
    return [int(client) for client in updates.clients[bad]]


def _rows(updates: ClientUpdates, like: Tensor) -> Tensor:
    """Return a chunk's updates (clients, parameters) in float64; zeros where all of its clients failed."""
    if UPDATE not in updates.values:
        return like.new_zeros(len(updates.clients), len(like))
    return updates.values[UPDATE].double()


def _replace_updates(updates: ClientUpdates, places: Ids, forged: Tensor) -> None:
    """Replace the updates at these places of a chunk, also in what a message holds."""
    rows = updates.values[UPDATE].clone()
    rows[torch.from_numpy(places)] = forged.to(rows)
    updates.values[UPDATE] = rows
    if UPDATE in updates.wire:
        updates.wire[UPDATE] = rows
