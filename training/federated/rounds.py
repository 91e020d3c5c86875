"""The loop of a federation: configure, train, update, aggregate, evaluate; and the same again.

A round is a step to everything below: launcher, checkpoints, reports, watchdog. What decides its numbers is a function
of the configuration and the round, or lies in the checkpoint; never of how many ranks there are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.attempt.heartbeat import Heartbeat, NullHeartbeat
from training.attempt.place import Place
from training.attempt.stopping import StopRequest
from training.checkpoint.staging import State
from training.engine.validating import Validations
from training.federated import assembly, client_failures
from training.federated.assembly import Federation
from training.federated.client_failures import ClientsFailed
from training.federated.controller import Controller, QuorumLost
from training.federated.coverage import CoverageLog
from training.federated.custom.program import Program
from training.federated.custom.split import DivisionRecord
from training.federated.evaluation import Judge, Judged
from training.federated.messages import Traffic
from training.federated.round_report import Telling, Told, told_of
from training.federated.schedule import Ids
from training.federated.server import QUARANTINED_AFTER
from training.federated.task_results import ClientOutcomes
from training.federated.transport.ranks import exchange
from training.federated.update_combiner import combining
from training.federation import custom, parts
from training.federation.attackers import attackers
from training.federation.client_selection import select
from training.federation.config import FederationConfig
from training.federation.round_plan import Plan, Scene
from training.loop import Loop, versions
from training.manifest import Manifest
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import Agreed, World

ATTEMPTS = 3
"""How often a round is tried with other clients before the run ends."""


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
        program: Program | None = None,
        least_share: float = 0.0,
    ) -> None:
        """`program`: somebody's own files, where the configuration asks for such; `least_share`: of all samples, that
        must have counted in some round for the run to complete."""
        self.validations = Validations(config, world)
        super().__init__(config, place, world, reporter=reporter, heartbeat=heartbeat, stop=stop, mtbf_hours=mtbf_hours)
        self.config = config
        self.remembers["validation"] = self.validations
        self.exchange = exchange(world)
        self._program, self._least_share = program, least_share

    # Setting up.

    def _prepare(self, start: Manifest | None) -> None:
        self._phase("data")
        self.federation = assembly.assemble(
            self.config, self.place, self.world, start, self._program, heartbeat=self.heartbeat, reporter=self.reporter
        )
        self.asked = self.config = self.federation.config
        if self.federation.base is not None:
            self.remembers["base"] = self.federation.base
        self.server, self.work = self.federation.server, self.federation.work
        self.remembers["server"] = self.server
        if self._program is not None and custom.SPLIT in self.config.custom:
            owners = self.federation.divided.owners["train"]
            self.remembers["split"] = DivisionRecord(self._program.split, owners)
        self.combining = combining(self.federation, self.exchange, self.world)
        self.judge = Judge(
            self.federation.model,
            self.federation.divided,
            self.world,
            alone=bool(self.work.alone),
            work=self.work,
            finetune_steps=self.config.finetune_steps,
        )
        self.coverage = CoverageLog(self.federation.divided.sizes)
        self.remembers["coverage"] = self.coverage
        self.telling = Telling(self.reporter, self.federation, self.coverage)
        if start is not None:
            self._phase("restore")
            self._recall(start)  # first: it says how many updates are on their way
            self.checkpoints.restore(self.server.state(), start)
        # What clients keep is written from where it lies: imports that begin with the save would hold up a round.
        self._prepares_at = self.step + 1 if self.server.kept and self.config.checkpoint_every else -1

    def _tell_started(self, start: Manifest | None) -> None:
        config, model = self.config, self.federation.model
        self.reporter.event(
            "run.started",
            recipe=config.recipe,
            algorithm=config.algorithm,
            adapters=config.adapters,
            steps=config.rounds,
            start_step=self.step,
            world_size=self.world.size,
            device=self.world.device.type,
            parameters=model.weights.size,
            travelling=model.weights.shared,
            frozen=model.numbers - model.weights.size,
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
        if bad := len(attackers(config)):
            self._say(f"{bad:,} of {config.clients:,} clients attack: {config.attack}")
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
        self.coverage.note(told.asked, told.clients[told.is_counted])
        told.seconds = time.perf_counter() - began
        self.cadence.note_step(told.seconds, saving=agreed.saving)
        self._told = told
        if agreed.stop and self.world.leads:  # nothing else is done at this boundary
            self.telling.tell(round_, told, None)
        return agreed

    def _round(self, round_: int) -> Told:
        """Configure, train, aggregate: one new global model."""
        tries: list[ClientOutcomes] = []
        why, wasted = "", Traffic.none()
        for attempt in range(1, ATTEMPTS + 1):
            self._check_anybody_is_left()
            plan = self._configure(round_, attempt)
            self.server.last_rounds[np.concatenate([plan.clients, plan.too_slow])] = round_
            controller = Controller(
                self.server,
                self.work,
                self.exchange,
                self.world,
                plan,
                combining=self.combining,
                round_=round_,
                beat=self._beat,
            )
            try:
                model = self._play(controller)
            except QuorumLost as error:
                why, model = str(error), None
            self.server.kept.release()
            if model is not None:
                self.server.shared.copy_(model)
                self.server.clock = plan.ends if plan.ends is not None else self.server.clock
                self._note(round_, controller.facts)
                controller.costs.traffic += wasted
                return told_of(controller)
            wasted = wasted + controller.costs.traffic
            tries.append(controller.facts)
            if self.world.leads:
                self.telling.tell_lost(round_, attempt, controller.facts, why)
            self._note(round_, controller.facts)
            self._check_anybody(round_, tries)
        server = self.server
        raise QuorumLost(
            client_failures.lost(round_, tries, why, clients=server.clients, eligible=len(server.eligible))
        )

    def _play(self, controller: Controller) -> Tensor:
        """The algorithm's own way through a round, or one question and its sums."""
        model = self.federation.model
        if model.algorithm.play is not None:
            return model.algorithm.play(controller, **model.options)
        assert model.algorithm.aggregate is not None
        return model.algorithm.aggregate(controller.train_round(), **model.options)

    def _configure(self, round_: int, attempt: int) -> Plan:
        """Who takes part, and for whom is waited."""
        config, server = self.config, self.server

        def chosen(count: int, without: Ids) -> Ids:
            eligible = np.setdiff1d(server.eligible, without, assume_unique=True)
            return select(
                config,
                count,
                eligible=eligible,
                samples=self.federation.divided.sizes,
                losses=server.losses,
                last_rounds=server.last_rounds,
                round_=round_,
                attempt=attempt,
                selection=self.federation.selection,
            )

        scene = Scene(
            seed=config.seed,
            round=round_,
            now=server.clock,
            wanted=config.selected,
            select=chosen,
            full_steps=self.work.full_steps,
            flight=server.pending.flight,
            is_partial=self.federation.model.algorithm.PARTIAL,
        )
        return parts.pace(config.pace).schedule(scene, **config.options_of(config.pace))

    def _note(self, round_: int, facts: ClientOutcomes) -> None:
        """What is remembered of those who were asked."""
        self.server.losses[facts.clients[facts.is_fine]] = facts.losses[facts.is_fine]
        self.server.broken[facts.broken] += 1
        out = [client for client in facts.broken if self.server.broken[client] == QUARANTINED_AFTER]
        if self.world.leads:
            self.telling.failures.tell_quarantined(round_, out, QUARANTINED_AFTER)

    def _check_anybody(self, round_: int, tries: Sequence[ClientOutcomes]) -> None:
        """Where nobody can do the work it is no use to ask others: the first client's error is the run's."""
        asked = len(tries[-1].clients)
        is_hopeless = (round_ == 1 and asked > 1) or len(tries) == ATTEMPTS
        if is_hopeless and client_failures.all_raised(tries) and (first := client_failures.first_of(tries)) is not None:
            again = f", {ATTEMPTS} times in a row" if len(tries) == ATTEMPTS else ""
            who = f"all {asked:,} clients" if asked > 1 else "the only client"
            raise ClientsFailed(f"in round {round_} {who} failed{again}, client {first[0]} so", first[1])

    def _check_anybody_is_left(self) -> None:
        if not len(self.server.eligible):
            raise QuorumLost(f"there is nobody to ask: {client_failures.left_out(self.server.clients, 0)}")

    def _beat(self) -> None:
        self.heartbeat.beat("step", self.step)

    # Between rounds.

    def _between_steps(self, agreed: Agreed) -> bool:
        if not self.checkpoints.busy:
            self.checkpoints.settle()
        if self.step == self._prepares_at and not agreed.saving:
            self.checkpoints.prepare(self._state())
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
        judged = self.judge.judge(self.server, goes_on=self._goes_on, round_=self.step)
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

    def _check_completed(self) -> None:
        self.coverage.check(self._least_share)

    def _state(self) -> State:
        return self.server.saved_state()

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
