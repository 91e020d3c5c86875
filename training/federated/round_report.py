"""What a federation reports: series of rank 0 by round, and who did what in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.federated.assembly import Federation
from training.federated.client_failures import Failures
from training.federated.controller import Controller
from training.federated.coverage import CoverageLog
from training.federated.evaluation import Judged
from training.federated.messages import Traffic
from training.federated.schedule import Ids
from training.federated.task_results import ClientOutcomes
from training.federation import tables
from training.federation.tables import FEWEST_EVALUATED, QUANTILES, Columns
from training.reporting.reporter import AnyReporter
from training.units import MIB

MOST_HELD = 8 * tables.NAMED
"""Clients that are held until the next event, of whom most will not be told of."""
TRAINED, LATE, DROPPED, REJECTED, BROKEN = range(len(tables.STATES))


@dataclass
class Told:
    """One round, as it went."""

    clients: Ids
    """Who took part, in the order in which they were computed."""
    asked: Ids
    """Who was asked, those with them whose updates arrive in a later round."""
    losses: NDArray[np.float64]
    states: NDArray[np.int64]
    """Numbers of tables.STATES."""
    failed: dict[int, str]
    """Client → its traceback."""
    samples: int
    loss: float
    compute_seconds: float
    wait_seconds: float
    transfer_seconds: float
    traffic: Traffic
    client_seconds: NDArray[np.float64]
    """Of each client: by the simulated clock where the pace has one, else what it took to compute; NaN: not known, as
    it was computed together with others."""
    seconds: float = 0.0

    @property
    def is_counted(self) -> NDArray[np.bool_]:
        counted: NDArray[np.bool_] = (self.states == TRAINED) | (self.states == LATE)
        return counted


def told_of(controller: Controller) -> Told:
    """What a round came to; the late updates that counted in it after those that were begun in it."""
    facts, plan, late, costs = controller.facts, controller.plan, controller.arrivals, controller.costs
    sizes = controller.samples_of(facts.clients)
    states = np.where(facts.is_fine, TRAINED, np.where(np.isin(facts.clients, list(facts.failed)), DROPPED, BROKEN))
    states = np.where(np.isin(facts.clients, controller.rejected), REJECTED, states)
    lates = np.where(np.isin(late.clients, controller.rejected), REJECTED, LATE)
    now = plan.is_now(facts.clients) | ~facts.is_fine
    clients = np.concatenate([facts.clients[now], late.clients, plan.too_slow])
    losses = np.concatenate([facts.losses[now], late.losses, np.full(len(plan.too_slow), np.nan)])
    good = facts.is_fine & now & (states != REJECTED)
    counted = np.concatenate([sizes[good], late.samples[lates == LATE]])
    seconds = plan.seconds if plan.ends is not None else facts.seconds
    return Told(
        clients=clients,
        asked=np.concatenate([facts.clients, plan.too_slow]),
        losses=losses,
        states=np.concatenate([states[now], lates, np.full(len(plan.too_slow), DROPPED)]),
        failed=facts.failed,
        samples=int(counted.sum()),
        loss=float(np.average(np.concatenate([facts.losses[good], late.losses[lates == LATE]]), weights=counted)),
        compute_seconds=costs.compute_seconds,
        wait_seconds=costs.wait_seconds,
        transfer_seconds=costs.transfer_seconds,
        traffic=costs.traffic,
        client_seconds=np.array([seconds.get(client, np.nan) for client in clients.tolist()]),
    )


class Telling:
    """On rank 0: numbers round by round, and once a second, ever rarer, who did what."""

    def __init__(self, reporter: AnyReporter, federation: Federation, coverage: CoverageLog) -> None:
        self._reporter, self._federation, self._coverage = reporter, federation, coverage
        self.failures = Failures(reporter, federation.divided.names)
        self._rounds: list[dict[str, float]] = []
        self._clients: list[Columns] = []
        self._began = self._told_at = time.monotonic()

    def tell_split(self) -> None:
        """Once: how the data lie, and whose they are."""
        divided = self._federation.divided
        sizes = divided.sizes
        self._reporter.event(
            "data.prepared",
            identity=self._federation.prepared.identity,
            samples=int(sizes.sum()),
            validation_samples=len(divided.owners["validation"]) - len(divided.root),
            clients={"least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max())},
        )
        for part in tables.splits(divided.counts(), divided.labels.names, divided.evaluated):
            self._reporter.event("clients.split", **part.pack())
        for some in tables.named(divided.names):
            self._reporter.event("clients.named", **some.pack())

    def tell(self, round_: int, told: Told, judged: Judged | None) -> None:
        """`judged`: what the validation after it has found, where there was one."""
        count = {state: int((told.states == number).sum()) for number, state in enumerate(tables.STATES)}
        self._reporter.log(
            round_,
            loss=told.loss,
            round_seconds=told.seconds,
            step_seconds=told.seconds,
            compute_seconds=told.compute_seconds,
            wait_seconds=told.wait_seconds,
            transfer_seconds=told.transfer_seconds,
            mib_up=told.traffic.bytes_up / MIB,
            mib_down=told.traffic.bytes_down / MIB,
            trained=float(count["trained"]),
            late=float(count["late"]),
            dropped=float(count["dropped"]),
            rejected=float(count["rejected"] + count["broken"]),
            **self._rate(round_),
            **_spread("client_loss", told.losses[told.is_counted]),
        )
        self.failures.tell(round_, told.failed, told.clients[told.states == BROKEN].tolist())
        self._note(round_, told, count, judged)
        self._say(round_, told, judged)

    def _rate(self, round_: int) -> dict[str, float]:
        """Return the clients' learning rate as a series, where it changes."""
        federation = self._federation
        is_constant = federation.config.client_lr_schedule == "constant"
        return {} if is_constant else {"client_learning_rate": federation.work.sgd(round_).learning_rate}

    def tell_lost(self, round_: int, attempt: int, facts: ClientOutcomes, why: str) -> None:
        """Of a try that came to no model."""
        self.failures.tell(round_, facts.failed, facts.broken)
        self.failures.tell_lost(round_, attempt, why)

    def tell_judged(self, round_: int, judged: Judged) -> None:
        means = {f"validation_{name}" if name == "loss" else name: mean for name, mean in judged.means.items()}
        accuracies, spreads = judged.by_client.get("accuracy"), {}
        if accuracies is not None:
            reliable = self._reliable(accuracies)
            spreads = _spread("client_accuracy", accuracies if np.isnan(reliable).all() else reliable)
        tuned = {f"finetuned_{name}": mean for name, mean in judged.finetuned_means.items()}
        if "accuracy" in judged.finetuned:
            spreads |= _spread("finetuned_accuracy", judged.finetuned["accuracy"])
        self._reporter.log(round_, **means, **spreads, **tuned)

    def _reliable(self, accuracies: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (clients,) with NaN for clients that too few samples evaluate."""
        return np.where(self._federation.divided.evaluated >= FEWEST_EVALUATED, accuracies, np.nan)

    def close(self) -> None:
        self._tell_rounds()
        self._reporter.flush()

    def _note(self, round_: int, told: Told, count: dict[str, int], judged: Judged | None) -> None:
        accuracy = judged.by_client.get("accuracy") if judged is not None else None
        reliable = self._reliable(accuracy) if accuracy is not None else None
        self._rounds.append(_in_all(round_, told, count, judged, reliable))
        self._clients.append(_of_each(round_, told, accuracy))
        if len(self._clients) * len(told.clients) > MOST_HELD:
            self._clients = [tables.foremost(_joined(self._clients))]
        now = time.monotonic()
        if len(self._rounds) == tables.ROUNDS or now - self._told_at >= self._interval(now):
            self._tell_rounds()

    def _interval(self, now: float) -> float:
        """Seconds from one event to the next: 20,000 in a month."""
        return max(1.0, (now - self._began) / 2500)

    def _tell_rounds(self) -> None:
        if not self._rounds:
            return
        rounds = {name: np.array([one[name] for one in self._rounds]) for name in tables.ROUND_COLUMNS}
        table = tables.RoundTable(rounds, _joined(self._clients))
        told: dict[str, Any] = {**table.pack()}
        if (coverage := self._coverage.coverage) is not None:
            told["coverage"] = coverage.pack()
        self._reporter.event("round.clients", step=int(self._rounds[-1]["round"]), **told)
        self._rounds, self._clients, self._told_at = [], [], time.monotonic()

    def _say(self, round_: int, told: Told, judged: Judged | None) -> None:
        means = {} if judged is None else judged.means
        found = "".join(f"  {'validation ' * (name == 'loss')}{name} {mean:.4f}" for name, mean in means.items())
        rest = f"  {int(told.is_counted.sum()):,} of {len(told.clients):,} clients  {told.seconds:.2f} s"
        print(f"round {round_}  loss {told.loss:.4f}{found}{rest}", flush=True)


def _in_all(
    round_: int, told: Told, count: dict[str, int], judged: Judged | None, reliable: NDArray[np.float64] | None
) -> dict[str, float]:
    """Return a row by tables.ROUND_COLUMNS. `reliable`: accuracies of clients that enough samples evaluate."""
    is_known = reliable is not None and not np.isnan(reliable).all()
    return {
        "round": round_,
        **count,
        "seconds": told.seconds,
        "bytes_up": told.traffic.bytes_up,
        "bytes_down": told.traffic.bytes_down,
        "loss": told.loss,
        "accuracy": judged.means.get("accuracy", np.nan) if judged is not None else np.nan,
        "worst": int(np.nanargmin(reliable)) if is_known else -1,  # type: ignore[arg-type]
    }


def _of_each(round_: int, told: Told, accuracy: NDArray[np.float64] | None) -> Columns:
    """By tables.CLIENT_COLUMNS: those who took part."""
    many = len(told.clients)
    return {
        "round": np.full(many, round_),
        "client": told.clients,
        "state": told.states,
        "loss": told.losses,
        "accuracy": accuracy[told.clients] if accuracy is not None else np.full(many, np.nan),
        "seconds": told.client_seconds,
    }


def _joined(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in tables.CLIENT_COLUMNS}


def _spread(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    """The distribution of something over clients, as series: of thousands of clients there can't be one each."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {}
    found = np.quantile(known, list(QUANTILES.values()))
    return {f"{name}_{which}": float(value) for which, value in zip(QUANTILES, found, strict=True)}
