"""The loop of a federation: in each round configure, train, aggregate and evaluate.

To everything below (launcher, checkpoints, reports, watchdog) a round is a step. Its numbers follow from the
configuration, the round and the checkpoint, never from the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.attempt.workspace import Workspace
from training.checkpoint.staging import State
from training.engine.validating import ValidationSchedule
from training.federated import assembly, client_failures
from training.federated.assembly import Federation
from training.federated.client_failures import ClientsFailed
from training.federated.controller import Controller, QuorumLost
from training.federated.coverage import CoverageLog
from training.federated.custom.split import DivisionRecord
from training.federated.custom.user_code import UserCode
from training.federated.evaluation import Evaluation, Evaluator
from training.federated.messages import Traffic
from training.federated.round_report import RoundReport, RoundReporter, report_of
from training.federated.schedule import Ids
from training.federated.server import QUARANTINED_AFTER
from training.federated.task_results import ClientOutcomes
from training.federated.transport.ranks import exchange
from training.federated.update_combiner import combiner_for
from training.federation import custom, parts
from training.federation.attackers import attackers
from training.federation.client_selection import SelectionState, select
from training.federation.config import FederationConfig
from training.federation.round_plan import PaceContext, RoundPlan
from training.loop import Loop, LoopServices, versions
from training.manifest import Manifest
from training.runtime.distributed import StepFlags, World

MAX_ATTEMPTS = 3
"""Attempts at a round, each with other clients, before the run ends."""


class Rounds(Loop):
    """A rank's loop over the rounds of a federation."""

    federation: Federation

    def __init__(
        self,
        config: FederationConfig,
        workspace: Workspace,
        world: World,
        services: LoopServices,
        *,
        user_code: UserCode | None = None,
        least_share: float = 0.0,
    ) -> None:
        """`user_code`: the user's files, if the configuration needs them.

        `least_share`: the share of all samples that must have counted in some round for the run to complete.
        """
        self.validations = ValidationSchedule(config, world)
        super().__init__(config, workspace, world, services)
        self.config = config
        self.stateful_parts["validation"] = self.validations
        self.exchange = exchange(world)
        self._user_code, self._least_share = user_code, least_share

    # Setup.

    def _prepare(self, start: Manifest | None) -> None:
        self._phase("data")
        self.federation = assembly.assemble(
            self.config,
            self.workspace,
            self.world,
            start,
            self._user_code,
            heartbeat=self.heartbeat,
            reporter=self.reporter,
        )
        self.base_config = self.config = self.federation.config
        if self.federation.base is not None:
            self.stateful_parts["base"] = self.federation.base
        self.server, self.work = self.federation.server, self.federation.work
        self.stateful_parts["server"] = self.server
        if self._user_code is not None and custom.SPLIT in self.config.custom:
            owners = self.federation.divided.owners["train"]
            self.stateful_parts["split"] = DivisionRecord(self._user_code.split, owners)
        self.combiner = combiner_for(self.federation, self.exchange, self.world)
        self.evaluator = Evaluator(
            self.federation.model,
            self.federation.divided,
            self.world,
            is_unstacked=bool(self.work.unstacked_reason),
            work=self.work,
            finetune_steps=self.config.finetune_steps,
        )
        self.coverage = CoverageLog(self.federation.divided.sizes)
        self.stateful_parts["coverage"] = self.coverage
        self.round_reporter = RoundReporter(self.reporter, self.federation, self.coverage)
        if start is not None:
            self._phase("restore")
            self._recall(start)  # first: it allocates the updates in flight
            self.checkpoints.restore(self.server.state(), start)
        # Client states are saved in place, so a save that had to import its modules first would delay a round.
        self._prepare_save_at = self.step + 1 if self.server.client_state and self.config.checkpoint_every else -1

    def _report_started(self, start: Manifest | None) -> None:
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
            frozen=model.parameter_count - model.weights.size,
            clients=config.clients,
            per_round=config.selected,
            unit="rounds",
            alone=self.work.unstacked_reason,
            resumed_from=start.name if start else None,
            versions=versions(),
            **model.task.facts,
        )
        self.round_reporter.report_split()
        self._phase("step")
        origin = f"from {start.name}" if start else "from scratch"
        ranks = f"{self.world.size} rank{'s' * (self.world.size > 1)} on {self.world.device.type}"
        self._log(
            f"{config.algorithm} on {config.recipe}: {model.weights.size:,} parameters, {config.selected:,} of "
            f"{config.clients:,} clients a round, {ranks}, {origin}, {config.rounds} rounds"
        )
        if bad := len(attackers(config)):
            self._log(f"{bad:,} of {config.clients:,} clients attack: {config.attack}")
        self._log(
            "clients are computed together"
            if not self.work.unstacked_reason
            else f"one by one: {self.work.unstacked_reason}"
        )

    # A round.

    def _run_step(self) -> StepFlags:
        began = time.perf_counter()
        round_ = self.step + 1
        self.heartbeat.beat("step", self.step)
        due = self.world.leads and self.cadence.is_due(round_)
        self.agreement.begin(stop=self.stop.is_requested, saving=self.checkpoints.is_saving, due=due)
        report = self._round(round_)
        self.step = round_
        self.consumed += report.samples
        agreed = self.agreement.end()
        self.coverage.record(report.selected, report.clients[report.is_counted])
        report.seconds = time.perf_counter() - began
        self.cadence.note_step(report.seconds, saving=agreed.saving)
        self._report = report
        if agreed.stop and self.world.leads:  # nothing else happens between these steps
            self.round_reporter.report_round(round_, report, None)
        return agreed

    def _round(self, round_: int) -> RoundReport:
        """Configure, train and aggregate one round, which makes one new global model."""
        failed_attempts: list[ClientOutcomes] = []
        why, wasted = "", Traffic.empty()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            self._check_clients_left()
            plan = self._configure(round_, attempt)
            self.server.last_rounds[np.concatenate([plan.clients, plan.too_slow])] = round_
            controller = Controller(
                self.server,
                self.work,
                self.exchange,
                self.world,
                plan,
                combining=self.combiner,
                round_=round_,
                beat=self._beat,
            )
            try:
                model = self._run_algorithm(controller)
            except QuorumLost as error:
                why = str(error)
            else:
                self.server.shared.copy_(model)
                self.server.clock = plan.ends_at if plan.ends_at is not None else self.server.clock
                self._record_outcomes(round_, controller.outcomes)
                controller.costs.traffic += wasted
                return report_of(controller)
            finally:
                self.server.client_state.release()
            wasted = wasted + controller.costs.traffic
            failed_attempts.append(controller.outcomes)
            if self.world.leads:
                self.round_reporter.report_lost_attempt(round_, attempt, controller.outcomes, why)
            self._record_outcomes(round_, controller.outcomes)
            self._check_not_all_failed(round_, failed_attempts)
        server = self.server
        raise QuorumLost(
            client_failures.describe_lost_round(
                round_, failed_attempts, why, clients=server.clients, eligible=len(server.eligible)
            )
        )

    def _run_algorithm(self, controller: Controller) -> Tensor:
        """Return the next shared model, by the algorithm's run_round(), or by aggregate() after one training task."""
        model = self.federation.model
        if model.algorithm.run_round is not None:
            return model.algorithm.run_round(controller, **model.options)
        return model.algorithm.aggregate(controller.train_round(), **model.options)

    def _configure(self, round_: int, attempt: int) -> RoundPlan:
        """Plan the round: who takes part, and for whom the server waits."""
        config, server = self.config, self.server

        def select_clients(count: int, without: Ids) -> Ids:
            eligible = np.setdiff1d(server.eligible, without, assume_unique=True)
            state = SelectionState(
                eligible=eligible,
                samples=self.federation.divided.sizes,
                losses=server.losses,
                last_rounds=server.last_rounds,
                round=round_,
                attempt=attempt,
            )
            return select(config, count, state, self.federation.selection)

        context = PaceContext(
            seed=config.seed,
            round=round_,
            now=server.clock,
            wanted=config.selected,
            select=select_clients,
            full_steps=self.work.full_steps,
            flight=server.pending.in_flight,
            is_partial=self.federation.model.algorithm.ACCEPTS_PARTIAL_WORK,
        )
        return parts.pace(config.pace).schedule(context, **config.options_of(config.pace))

    def _record_outcomes(self, round_: int, outcomes: ClientOutcomes) -> None:
        """Record the losses and the non-finite updates of the clients of a round."""
        self.server.losses[outcomes.clients[outcomes.is_finite]] = outcomes.losses[outcomes.is_finite]
        self.server.broken_updates[outcomes.broken] += 1
        quarantined = [client for client in outcomes.broken if self.server.broken_updates[client] == QUARANTINED_AFTER]
        if self.world.leads:
            self.round_reporter.failures.report_quarantined(round_, quarantined, QUARANTINED_AFTER)

    def _check_not_all_failed(self, round_: int, attempts: Sequence[ClientOutcomes]) -> None:
        """Raise ClientsFailed with the first client's error if no client can do the work: others would also fail."""
        selected = len(attempts[-1].clients)
        is_hopeless = (round_ == 1 and selected > 1) or len(attempts) == MAX_ATTEMPTS
        if (
            is_hopeless
            and client_failures.all_raised(attempts)
            and (first := client_failures.first_failure(attempts)) is not None
        ):
            again = f", {MAX_ATTEMPTS} times in a row" if len(attempts) == MAX_ATTEMPTS else ""
            who = f"all {selected:,} clients" if selected > 1 else "the only client"
            raise ClientsFailed(f"in round {round_} {who} failed{again}; client {first[0]} failed with", first[1])

    def _check_clients_left(self) -> None:
        if not len(self.server.eligible):
            raise QuorumLost(
                f"no client can be selected: {client_failures.describe_quarantined(self.server.clients, 0)}"
            )

    def _beat(self) -> None:
        self.heartbeat.beat("step", self.step)

    # Between rounds.

    def _between_steps(self, agreed: StepFlags) -> bool:
        if not self.checkpoints.is_saving:
            self.checkpoints.process_ended_save()
        if self.step == self._prepare_save_at and not agreed.saving:
            self.checkpoints.prepare(self._state())
        evaluation: Evaluation | None = None
        if self.validations.is_due(self.step):
            evaluation = self._validate()
        if self.world.leads:
            self.round_reporter.report_round(self.step, self._report, evaluation)
        if evaluation is None and self.validations.is_missing(self.step):
            return True
        self._save_if_due(agreed, required=self.validations.has_best(self.step) or self._is_permanent())
        return False

    def _catch_up(self, start: Manifest | None) -> bool:
        return start is not None and self.validations.is_missing(self.step) and self._validate() is None

    def _validate(self) -> Evaluation | None:
        """Return the evaluation; None if a stop cut it short."""
        self.heartbeat.beat("validate", self.step)
        evaluation = self.evaluator.evaluate(self.server, should_continue=self._should_continue, round_=self.step)
        if evaluation is None:
            return None
        self.validations.record(self.step, evaluation.means)
        if self.world.leads:
            self.round_reporter.report_evaluation(self.step, evaluation)
        self.heartbeat.beat("step", self.step)
        return evaluation

    def _should_continue(self) -> bool:
        self.heartbeat.beat("validate", self.step)
        return not self.agreement.now(stop=self.stop.is_requested).stop

    def _check_completed(self) -> None:
        self.coverage.check(self._least_share)

    def _state(self) -> State:
        return self.server.saved_state()

    def _layout(self) -> dict[str, Any]:
        return {
            "clients": "alone" if self.work.unstacked_reason else "stacked",
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
        self.round_reporter.close()
