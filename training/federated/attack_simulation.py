"""Attackers in a simulated federation: what they train on, and what they send instead of what they have learnt.

Attacks that need nobody else's update are applied client by client, before filters. Those that collude need all of a
round's: each rank then holds the updates of its clients until all are there; rank 0 forges and broadcasts, as different
processors round differently. Running statistics, losses and what clients keep stay honest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from training.config.asked import ConfigError, Problem
from training.data import Batch, Ids, Split, Task
from training.federated.client_tasks import Sent
from training.federated.transport.ranks import Ranks
from training.federation import parts, random_streams
from training.federation.attackers import attackers
from training.federation.config import FederationConfig
from training.federation.data_division import Divided
from training.federation.filter_order import UPDATE
from training.runtime.distributed import World
from training.runtime.seeds import derive_seed

SCANNED = 4096
"""Samples that are looked up at a time to find which labels there are."""


@dataclass(frozen=True)
class Knowledge:
    """Hold what attackers know besides their own updates, which are in order of their numbers."""

    clients: Ids
    """(attackers,): their numbers."""
    round: int
    seed: int
    """The run's."""
    honest: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    """(clients, numbers) float64: the updates of all that do not attack, for attacks that COLLUDE."""

    def generator(self, place: int) -> torch.Generator:
        """Return the random numbers of one attacker in this round, on the CPU whatever the device."""
        seed = derive_seed(self.seed, random_streams.ATTACK, self.round, int(self.clients[place]))
        return torch.Generator().manual_seed(seed)


class Attacking:
    """The attack of a run."""

    def __init__(self, config: FederationConfig) -> None:
        self._seed = config.seed
        self._attack, self._options = parts.attack(config.attack), config.options_of(config.attack)
        self._attackers = attackers(config)

    @property
    def colludes(self) -> bool:
        return self._attack.COLLUDES

    def attack_alone(self, sent: Sent, round_: int) -> None:
        """Replace the attackers' updates of a chunk, unless they collude."""
        if self._attack.CHANGES_UPDATES and not self.colludes and UPDATE in sent.values:
            places = np.flatnonzero(self._attacks(sent))
            if len(places):
                updates = sent.values[UPDATE][torch.from_numpy(places)].double()
                known = Knowledge(sent.clients[places], round_, self._seed)
                _put(sent, places, self._attack.forge(updates, known, **self._options))

    def collude(
        self, chunks: Sequence[Sent], clients: Sequence[Ids], round_: int, exchange: Ranks, world: World
    ) -> None:
        """Replace the attackers' updates of a round. `chunks`: of this rank; `clients`: of each rank, in that order."""
        broken = {
            client for each in exchange.facts([_unusable(sent) for sent in chunks]) for some in each for client in some
        }
        numbers = exchange.facts([sent.values[UPDATE].shape[1] for sent in chunks if UPDATE in sent.values])
        size = next((found[0] for found in numbers if found), 0)
        everybody = np.concatenate([np.zeros(0, dtype=np.int64), *clients])
        usable = ~np.isin(everybody, list(broken))
        bad = np.sort(everybody[usable & np.isin(everybody, self._attackers)])
        honest = np.sort(everybody[usable & ~np.isin(everybody, self._attackers)])
        if not len(bad) or not len(honest):
            return
        like = {UPDATE: torch.zeros(size, dtype=torch.float64, device=world.device)}
        own = {UPDATE: torch.cat([_rows(sent, like[UPDATE]) for sent in chunks])} if chunks else {}
        rows = exchange.rows(own, [len(some) for some in clients], like)[UPDATE]
        forged = {}
        if world.leads:
            order = {client: place for place, client in enumerate(everybody.tolist())}
            bads, others = ([order[client] for client in some.tolist()] for some in (bad, honest))
            known = Knowledge(bad, round_, self._seed, rows[others])
            forged = {UPDATE: self._attack.forge(rows[bads], known, **self._options).contiguous()}
        found = exchange.rows(forged, [len(bad), *[0] * (world.size - 1)], like)[UPDATE]
        for sent in chunks:
            places = np.flatnonzero(np.isin(sent.clients, bad))
            if len(places):
                _put(sent, places, found[torch.from_numpy(np.searchsorted(bad, sent.clients[places]))])

    def _attacks(self, sent: Sent) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which of a chunk's clients (clients,) attack and have not failed."""
        return np.isin(sent.clients, self._attackers) & ~np.isin(sent.clients, list(sent.failed))


def relabelled(config: FederationConfig, task: Task, divided: Divided) -> Task:
    """Return the task with the labels that attackers train on; ConfigError if samples have no class each."""
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
    for begin in range(0, task.samples["train"], SCANNED):
        *inputs, labels = task.batch("train", np.arange(begin, min(begin + SCANNED, task.samples["train"])))
        if not inputs or labels.dim() != 1 or labels.is_floating_point():
            text = f'is "{config.attack}", but samples of {config.recipe} have no class each. Write "sign_flip".'
            raise ConfigError([Problem("run.attack", text)])
        found = np.union1d(found, labels.numpy())
    return torch.from_numpy(found)


def _unusable(sent: Sent) -> list[int]:
    """Return the clients of a chunk that have sent nothing, or something that is not finite."""
    if UPDATE not in sent.values:
        return [int(client) for client in sent.clients]
    finite = torch.isfinite(sent.values[UPDATE]).all(dim=1).cpu().numpy()
    bad = ~finite | np.isin(sent.clients, list(sent.failed))
    return [int(client) for client in sent.clients[bad]]


def _rows(sent: Sent, like: Tensor) -> Tensor:
    """Return a chunk's updates (clients, numbers) in float64; zeros where all of its clients failed."""
    if UPDATE not in sent.values:
        return like.new_zeros(len(sent.clients), len(like))
    return sent.values[UPDATE].double()


def _put(sent: Sent, places: Ids, forged: Tensor) -> None:
    """Replace the updates at these places of a chunk, also in what a message holds."""
    rows = sent.values[UPDATE].clone()
    rows[torch.from_numpy(places)] = forged.to(rows)
    sent.values[UPDATE] = rows
    if UPDATE in sent.wire:
        sent.wire[UPDATE] = rows
