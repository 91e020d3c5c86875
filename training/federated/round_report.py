"""Report a federation's rounds from rank 0: series by round, and what each client did."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.federated.assembly import Federation
from training.federated.client_failures import FailureReporter
from training.federated.controller import Controller
from training.federated.coverage import CoverageLog
from training.federated.evaluation import Evaluation
from training.federated.messages import Traffic
from training.federated.schedule import Ids
from training.federated.task_results import ClientOutcomes
from training.federation import tables
from training.federation.tables import MIN_EVALUATED, QUANTILES, Columns
from training.reporting.reporter import AnyReporter
from training.units import MIB

MAX_BUFFERED_CLIENTS = 8 * tables.NAMED
"""Clients that are buffered until the next event; most of them will not be in it."""
TRAINED, LATE, DROPPED, REJECTED, BROKEN = range(len(tables.STATES))


@dataclass
class RoundReport:
    """The outcome of one round."""

    clients: Ids
    """The clients that took part, in the order in which they were computed."""
    selected: Ids
    """The clients that were selected, including those whose updates arrive in a later round."""
    losses: NDArray[np.float64]
    states: NDArray[np.int64]
    """(clients,): indices into tables.STATES."""
    failed: dict[int, str]
    """Tracebacks by client."""
    samples: int
    loss: float
    compute_seconds: float
    wait_seconds: float
    transfer_seconds: float
    traffic: Traffic
    client_seconds: NDArray[np.float64]
    """(clients,): seconds of the simulated clock where the pace has one, else of computation; NaN if the client was
    computed together with others."""
    seconds: float = 0.0

    @property
    def is_counted(self) -> NDArray[np.bool_]:
        """Return which clients' updates count in the round, (clients,)."""
        counted: NDArray[np.bool_] = (self.states == TRAINED) | (self.states == LATE)
        return counted


def report_of(controller: Controller) -> RoundReport:
    """Return the report of a finished round.

    Clients that started in it come first, then late ones that counted in it.
    """
    outcomes, plan, late, costs = controller.outcomes, controller.plan, controller.arrivals, controller.costs
    sizes = controller.samples_of(outcomes.clients)
    states = np.where(
        outcomes.is_finite, TRAINED, np.where(np.isin(outcomes.clients, list(outcomes.failed)), DROPPED, BROKEN)
    )
    states = np.where(np.isin(outcomes.clients, controller.rejected), REJECTED, states)
    late_states = np.where(np.isin(late.clients, controller.rejected), REJECTED, LATE)
    counts_now = plan.counts_in_round(outcomes.clients) | ~outcomes.is_finite
    clients = np.concatenate([outcomes.clients[counts_now], late.clients, plan.too_slow])
    losses = np.concatenate([outcomes.losses[counts_now], late.losses, np.full(len(plan.too_slow), np.nan)])
    good = outcomes.is_finite & counts_now & (states != REJECTED)
    counted = np.concatenate([sizes[good], late.samples[late_states == LATE]])
    seconds = plan.seconds if plan.ends_at is not None else outcomes.seconds
    return RoundReport(
        clients=clients,
        selected=np.concatenate([outcomes.clients, plan.too_slow]),
        losses=losses,
        states=np.concatenate([states[counts_now], late_states, np.full(len(plan.too_slow), DROPPED)]),
        failed=outcomes.failed,
        samples=int(counted.sum()),
        loss=float(
            np.average(np.concatenate([outcomes.losses[good], late.losses[late_states == LATE]]), weights=counted)
        ),
        compute_seconds=costs.compute_seconds,
        wait_seconds=costs.wait_seconds,
        transfer_seconds=costs.transfer_seconds,
        traffic=costs.traffic,
        client_seconds=np.array([seconds.get(client, np.nan) for client in clients.tolist()]),
    )


class RoundReporter:
    """Reports from rank 0: series in each round, and events about single clients.

    Events are sent at most once a second, and less and less often in a long run.
    """

    def __init__(self, reporter: AnyReporter, federation: Federation, coverage: CoverageLog) -> None:
        self._reporter, self._federation, self._coverage = reporter, federation, coverage
        self.failures = FailureReporter(reporter, federation.divided.names)
        self._rounds: list[dict[str, float]] = []
        self._clients: list[Columns] = []
        self._began = self._reported_at = time.monotonic()

    def report_split(self) -> None:
        """Report once how the data are divided, and the clients' names."""
        divided = self._federation.divided
        sizes = divided.sizes
        self._reporter.event(
            "data.prepared",
            identity=self._federation.prepared.identity,
            samples=int(sizes.sum()),
            validation_samples=len(divided.owners["validation"]) - len(divided.root),
            clients={"least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max())},
        )
        for part in tables.split_events(divided.counts(), divided.labels.names, divided.validation_sizes):
            self._reporter.event("clients.split", **part.pack())
        for some in tables.name_events(divided.names):
            self._reporter.event("clients.named", **some.pack())

    def report_round(self, round_: int, report: RoundReport, evaluation: Evaluation | None) -> None:
        """Report a finished round. `evaluation`: that of the validation after it, if there was one."""
        count = {state: int((report.states == number).sum()) for number, state in enumerate(tables.STATES)}
        self._reporter.log(
            round_,
            **self._series(round_, report, count).values(),
            **_quantiles("client_loss", report.losses[report.is_counted]),
        )
        self.failures.report(round_, report.failed, report.clients[report.states == BROKEN].tolist())
        self._buffer(round_, report, count, evaluation)
        self._print(round_, report, evaluation)

    def _series(self, round_: int, report: RoundReport, count: Mapping[str, int]) -> tables.RoundSeries:
        is_constant = self._federation.config.client_lr_schedule == "constant"
        return tables.RoundSeries(
            loss=report.loss,
            round_seconds=report.seconds,
            step_seconds=report.seconds,
            compute_seconds=report.compute_seconds,
            wait_seconds=report.wait_seconds,
            transfer_seconds=report.transfer_seconds,
            mib_up=report.traffic.bytes_up / MIB,
            mib_down=report.traffic.bytes_down / MIB,
            trained=float(count["trained"]),
            late=float(count["late"]),
            dropped=float(count["dropped"]),
            rejected=float(count["rejected"] + count["broken"]),
            client_learning_rate=None if is_constant else self._federation.work.sgd(round_).learning_rate,
        )

    def report_lost_attempt(self, round_: int, attempt: int, outcomes: ClientOutcomes, why: str) -> None:
        """Report an attempt at a round that made no model."""
        self.failures.report(round_, outcomes.failed, outcomes.broken)
        self.failures.report_lost_attempt(round_, attempt, why)

    def report_evaluation(self, round_: int, evaluation: Evaluation) -> None:
        """Report a validation's means, and their distribution over clients."""
        means = {f"validation_{name}" if name == "loss" else name: mean for name, mean in evaluation.means.items()}
        accuracies, spreads = evaluation.by_client.get("accuracy"), {}
        if accuracies is not None:
            reliable = self._reliable(accuracies)
            spreads = _quantiles("client_accuracy", accuracies if np.isnan(reliable).all() else reliable)
        finetuned = {f"finetuned_{name}": mean for name, mean in evaluation.finetuned_means.items()}
        if "accuracy" in evaluation.finetuned:
            spreads |= _quantiles("finetuned_accuracy", evaluation.finetuned["accuracy"])
        self._reporter.log(round_, **means, **spreads, **finetuned)

    def _reliable(self, accuracies: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (clients,) with NaN for clients that too few samples evaluate."""
        return np.where(self._federation.divided.validation_sizes >= MIN_EVALUATED, accuracies, np.nan)

    def close(self) -> None:
        self._send_rounds()
        self._reporter.flush()

    def _buffer(self, round_: int, report: RoundReport, count: dict[str, int], evaluation: Evaluation | None) -> None:
        accuracy = evaluation.by_client.get("accuracy") if evaluation is not None else None
        reliable = self._reliable(accuracy) if accuracy is not None else None
        self._rounds.append(_round_row(round_, report, count, evaluation, reliable))
        self._clients.append(_client_rows(round_, report, accuracy))
        if len(self._clients) * len(report.clients) > MAX_BUFFERED_CLIENTS:
            self._clients = [tables.most_notable(_concatenated(self._clients))]
        now = time.monotonic()
        if len(self._rounds) == tables.ROUNDS or now - self._reported_at >= self._interval(now):
            self._send_rounds()

    def _interval(self, now: float) -> float:
        """Return the seconds from one event to the next, which make 20,000 events in a month."""
        return max(1.0, (now - self._began) / 2500)

    def _send_rounds(self) -> None:
        if not self._rounds:
            return
        rounds = {name: np.array([row[name] for row in self._rounds]) for name in tables.ROUND_COLUMNS}
        table = tables.RoundTable(rounds, _concatenated(self._clients))
        payload: dict[str, Any] = {**table.pack()}
        if (coverage := self._coverage.coverage) is not None:
            payload["coverage"] = coverage.pack()
        self._reporter.event("round.clients", step=int(self._rounds[-1]["round"]), **payload)
        self._rounds, self._clients, self._reported_at = [], [], time.monotonic()

    def _print(self, round_: int, report: RoundReport, evaluation: Evaluation | None) -> None:
        means = {} if evaluation is None else evaluation.means
        found = "".join(f"  {'validation ' * (name == 'loss')}{name} {mean:.4f}" for name, mean in means.items())
        rest = f"  {int(report.is_counted.sum()):,} of {len(report.clients):,} clients  {report.seconds:.2f} s"
        print(f"round {round_}  loss {report.loss:.4f}{found}{rest}", flush=True)


def _round_row(
    round_: int,
    report: RoundReport,
    count: dict[str, int],
    evaluation: Evaluation | None,
    reliable: NDArray[np.float64] | None,
) -> dict[str, float]:
    """Return a row by tables.ROUND_COLUMNS. `reliable`: accuracies of clients that enough samples evaluate."""
    has_accuracy = reliable is not None and not np.isnan(reliable).all()
    return {
        "round": round_,
        **count,
        "seconds": report.seconds,
        "bytes_up": report.traffic.bytes_up,
        "bytes_down": report.traffic.bytes_down,
        "loss": report.loss,
        "accuracy": evaluation.means.get("accuracy", np.nan) if evaluation is not None else np.nan,
        "worst": int(np.nanargmin(reliable)) if has_accuracy else -1,  # type: ignore[arg-type]
    }


def _client_rows(round_: int, report: RoundReport, accuracy: NDArray[np.float64] | None) -> Columns:
    """Return the rows of the clients that took part, by tables.CLIENT_COLUMNS."""
    many = len(report.clients)
    return {
        "round": np.full(many, round_),
        "client": report.clients,
        "state": report.states,
        "loss": report.losses,
        "accuracy": accuracy[report.clients] if accuracy is not None else np.full(many, np.nan),
        "seconds": report.client_seconds,
    }


def _concatenated(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in tables.CLIENT_COLUMNS}


def _quantiles(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    """Return the quantiles of a value over clients as series: thousands of clients cannot have one series each."""
    values_present = values[~np.isnan(values)]
    if not len(values_present):
        return {}
    found = np.quantile(values_present, list(QUANTILES.values()))
    return {f"{name}_{which}": float(value) for which, value in zip(QUANTILES, found, strict=True)}
