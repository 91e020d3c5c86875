"""The loop of a federation: configure, train, update, aggregate, evaluate; and the same again.

A round is a step to everything below: launcher, checkpoints, reports, watchdog. What decides its numbers is a function
of the configuration and the round, or lies in the checkpoint; never of how many ranks there are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.attempt.heartbeat import Heartbeat, NullHeartbeat
from training.attempt.place import Place
from training.attempt.stopping import StopRequest
from training.checkpoint.staging import State
from training.engine.validating import Validations
from training.federated import assembling, messages, schedule, sums
from training.federated.assembling import Federation
from training.federated.judging import Judge, Judged
from training.federated.schedule import Chunk, Ids
from training.federated.selecting import select
from training.federated.telling import BROKEN, DROPPED, TRAINED, Telling, Told
from training.federated.transport.ranks import exchange
from training.federated.working import Sent
from training.federation.config import FederationConfig
from training.loop import Loop, versions
from training.manifest import Manifest
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import Agreed, World

ATTEMPTS = 3
"""How often a round is tried with other clients before the run ends."""


@dataclass
class _Mine:
    """What one rank's clients of a round came to."""

    clients: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    counts: list[bool] = field(default_factory=list)
    """Whether each one's update counts: it is there, and made of numbers."""
    failed: dict[int, str] = field(default_factory=dict)
    kept: list[dict[str, Tensor]] = field(default_factory=list)
    seconds: float = 0.0


class Rounds(Loop):
    """One rank's part of a federation."""

    federation: Federation

    def __init__(
        self,
        config: FederationConfig,
        place: Place,
        world: World,
        *,
        reporter: AnyReporter,
        heartbeat: Heartbeat | NullHeartbeat,
        stop: StopRequest,
        mtbf_hours: float | None = None,
    ) -> None:
        self.validations = Validations(config, world)
        super().__init__(config, place, world, reporter=reporter, heartbeat=heartbeat, stop=stop, mtbf_hours=mtbf_hours)
        self.config = config
        self.remembers["validation"] = self.validations
        self.exchange = exchange(world)

    # Setting up.

    def _prepare(self, start: Manifest | None) -> None:
        self._phase("data")
        self.federation = assembling.assemble(
            self.config, self.place, self.world, start, heartbeat=self.heartbeat, reporter=self.reporter
        )
        self.server, self.work = self.federation.server, self.federation.work
        self.remembers["server"] = self.server
        self.judge = Judge(self.federation.model, self.federation.divided, self.world)
        self.telling = Telling(self.reporter, self.federation)
        if start is not None:
            self._phase("restore")
            self.checkpoints.restore(self.server.state(), start)
            self._recall(start)

    def _tell_started(self, start: Manifest | None) -> None:
        config, model = self.config, self.federation.model
        self.reporter.event(
            "run.started",
            recipe=config.recipe,
            algorithm=config.algorithm,
            steps=config.rounds,
            start_step=self.step,
            world_size=self.world.size,
            device=self.world.device.type,
            parameters=model.weights.size,
            travelling=model.weights.shared,
            clients=config.clients,
            per_round=config.selected,
            unit="rounds",
            alone=self.work.alone,
            resumed_from=start.name if start else None,
            versions=versions(),
            **model.task.facts,
        )
        self.telling.tell_split()
        self._phase("step")
        came = f"from {start.name}" if start else "afresh"
        ranks = f"{self.world.size} rank{'s' * (self.world.size > 1)} on {self.world.device.type}"
        self._say(
            f"{config.algorithm} on {config.recipe}: {model.weights.size:,} parameters, {config.selected:,} of "
            f"{config.clients:,} clients a round, {ranks}, {came}, {config.rounds} rounds"
        )
        self._say("clients are computed together" if not self.work.alone else f"one by one: {self.work.alone}")

    # A round.

    def _one_step(self) -> Agreed:
        began = time.perf_counter()
        round_ = self.step + 1
        self.heartbeat.beat("step", self.step)
        due = self.world.leads and self.cadence.due(round_)
        self.agreement.begin(stop=self.stop.asked, saving=self.checkpoints.busy, due=due)
        told = self._round(round_)
        self.step = round_
        self.consumed += told.samples
        agreed = self.agreement.end()
        told.seconds = time.perf_counter() - began
        self.cadence.note_step(told.seconds, saving=agreed.saving)
        self._told = told
        return agreed

    def _round(self, round_: int) -> Told:
        """Configure, train, aggregate: one new global model."""
        for attempt in range(1, ATTEMPTS + 1):
            chosen = self._configure(round_, attempt)
            chunks = self._chunks(chosen)
            shares = schedule.shares(chunks, self.world.size)
            mine, total = self._train(round_, chunks, shares)
            told = self._aggregate(round_, chosen, chunks, shares, mine, total)
            if told is not None:
                return told
        raise RuntimeError(f"round {round_}: no client's update counted, {ATTEMPTS} times")

    def _configure(self, round_: int, attempt: int) -> Ids:
        """Who takes part."""
        return select(
            self.config,
            eligible=self.server.eligible,
            samples=self.federation.divided.sizes,
            losses=self.server.losses,
            round_=round_,
            attempt=attempt,
        )

    def _chunks(self, chosen: Ids) -> list[Chunk]:
        config, samples = self.config, self.federation.divided.sizes[chosen]
        steps = schedule.steps_of(samples, config.batch, epochs=config.epochs, local_steps=config.local_steps)
        widths = schedule.widths_of(samples, config.batch)
        numbers = self.federation.model.weights.size
        return schedule.cut(chosen, steps, widths, numbers=numbers, alone=bool(self.work.alone))

    def _train(self, round_: int, chunks: list[Chunk], shares: list[range]) -> tuple[_Mine, sums.Tree]:
        """This rank's clients, their updates added up as they come."""
        began = time.perf_counter()
        mine, tree = _Mine(), sums.Tree(len(chunks))
        sent = self.server.broadcast
        for number in shares[self.world.rank]:
            self.heartbeat.beat("step", self.step)
            chunk = chunks[number]
            done = self.work.run(chunk, round_, self.server.shared, self.server.statistics, sent, self.server.kept)
            tree.put((number, 1), self._summed(done, mine))
        mine.seconds = time.perf_counter() - began
        return mine, tree

    def _summed(self, done: Sent, mine: _Mine) -> Tensor:
        """The weighted sum of a chunk's updates, without those that are no numbers."""
        sizes = self.work.sizes
        total = sums.zeros(sum(sizes.values()), self.world.device)
        missing = set(done.failed)
        good = torch.isfinite(done.losses)
        for value in done.values.values():
            good &= torch.isfinite(value).all(dim=1)
        counts = [
            bool(fine) and client not in missing for fine, client in zip(good.tolist(), done.clients, strict=True)
        ]
        samples = torch.from_numpy(self.federation.divided.sizes[done.clients]).double()
        weight = torch.tensor(counts, dtype=torch.float64)
        for (name, part), value in zip(sums.split(total, sizes).items(), done.values.values(), strict=False):
            rows = value if all(counts) else torch.where(weight[:, None].bool(), value, 0)
            sums.add_weighted(part, rows, weight * samples if self.server.weighted_by(name) == "samples" else weight)
        mine.clients += done.clients.tolist()
        mine.losses += done.losses.tolist()
        mine.counts += counts
        mine.failed |= done.failed
        if done.kept:
            mine.kept.append(self._kept(done, counts))
        return total

    def _kept(self, done: Sent, counts: list[bool]) -> dict[str, Tensor]:
        """What the clients keep; those whose update does not count keep what they had."""
        if all(counts):
            return done.kept
        is_good, rows = torch.tensor(counts), torch.from_numpy(done.clients)
        return {
            name: torch.where(is_good.view(-1, *[1] * (value.ndim - 1)), value, self.server.kept[name][rows])
            for name, value in done.kept.items()
        }

    def _aggregate(
        self, round_: int, chosen: Ids, chunks: list[Chunk], shares: list[range], mine: _Mine, tree: sums.Tree
    ) -> Told | None:
        """The next model, the same on every rank; None if no update counts."""
        began = time.perf_counter()
        facts = self.exchange.facts((mine.clients, mine.losses, mine.counts, mine.failed, mine.seconds))
        waited = time.perf_counter() - began
        clients = np.array([client for part in facts for client in part[0]], dtype=np.int64)
        losses = np.array([loss for part in facts for loss in part[1]])
        counts = np.array([count for part in facts for count in part[2]], dtype=bool)
        failed: dict[int, str] = {client: text for part in facts for client, text in part[3].items()}
        self._note(clients, losses, counts, failed)
        total = self.exchange.total(tree, shares, len(chunks), sum(self.work.sizes.values()))
        if not counts.any():
            return None
        samples = self.federation.divided.sizes[clients]
        weight = float(samples[counts].sum())
        parts = sums.split(total, self.work.sizes)
        self.server.apply(parts, number=round_, samples=weight, selected=int(counts.sum()))
        self._keep(mine, facts, clients)
        return Told(
            clients=clients,
            losses=losses,
            states=_states(clients, counts, failed),
            failed=failed,
            samples=int(samples[counts].sum()),
            loss=float((losses[counts] * samples[counts]).sum() / weight),
            compute_seconds=float(mine.seconds),
            wait_seconds=waited,
            transfer_seconds=time.perf_counter() - began - waited,
            bytes_up=self.messages.up * int(counts.sum()),
            bytes_down=self.messages.down * len(clients),
            client_seconds=np.full(len(clients), np.nan),
        )

    def _note(
        self, clients: Ids, losses: NDArray[np.float64], counts: NDArray[np.bool_], failed: dict[int, str]
    ) -> None:
        self.server.losses[clients[counts]] = losses[counts]
        for client in clients[~counts].tolist():
            if client not in failed:
                self.server.broken[client] += 1

    def _keep(self, mine: _Mine, facts: list[Any], clients: Ids) -> None:
        if not self.server.kept:
            return
        own = {name: torch.cat([part[name] for part in mine.kept]) for name in self.server.kept} if mine.kept else {}
        like = {name: values[0] for name, values in self.server.kept.items()}
        rows = self.exchange.rows(own, [len(part[0]) for part in facts], like)
        where = torch.from_numpy(clients)
        for name, values in rows.items():
            self.server.kept[name][where] = values

    @property
    def messages(self) -> messages.Sizes:
        return self.work.messages

    # Between rounds.

    def _between_steps(self, agreed: Agreed) -> bool:
        if not self.checkpoints.busy:
            self.checkpoints.settle()
        judged: Judged | None = None
        if self.validations.is_due(self.step):
            judged = self._validate()
        if self.world.leads:
            self.telling.tell(self.step, self._told, judged)
        if judged is None and self.validations.is_owed(self.step):
            return True
        self._save_if_due(agreed, promised=self.validations.has_best(self.step) or self._is_kept())
        return False

    def _make_up(self, start: Manifest | None) -> bool:
        return start is not None and self.validations.is_owed(self.step) and self._validate() is None

    def _validate(self) -> Judged | None:
        """None if cut short by a stop."""
        self.heartbeat.beat("validate", self.step)
        judged = self.judge.judge(self.server, goes_on=self._goes_on)
        if judged is None:
            return None
        self.validations.found(self.step, judged.means)
        if self.world.leads:
            self.telling.tell_judged(self.step, judged)
        self.heartbeat.beat("step", self.step)
        return judged

    def _goes_on(self) -> bool:
        self.heartbeat.beat("validate", self.step)
        return not self.agreement.now(stop=self.stop.asked).stop

    def _state(self) -> State:
        return self.server.state()

    def _layout(self) -> dict[str, Any]:
        return {
            "clients": "alone" if self.work.alone else "stacked",
            "device": self.world.device.type,
            "threads": torch.get_num_threads(),
        }

    def _data_identity(self) -> str:
        return self.federation.prepared.identity

    def _validation_loss(self) -> float | None:
        return self.validations.loss_at(self.step)

    def _forget(self, state: Mapping[str, Any]) -> None:
        self.validations.forget(state)

    def _close(self) -> None:
        self.telling.close()


def _states(clients: Ids, counts: NDArray[np.bool_], failed: Mapping[int, str]) -> NDArray[np.int64]:
    did = np.isin(clients, list(failed))
    return np.select([counts, did], [TRAINED, DROPPED], BROKEN)
