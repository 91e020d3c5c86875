"""What a federation reports: series of rank 0 by round, and who did what in it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from training.federated.assembling import Federation
from training.federated.judging import Judged
from training.federated.schedule import Ids
from training.reporting.reporter import AnyReporter
from training.units import MIB

QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}


@dataclass
class Told:
    """One round, as it went."""

    clients: Ids
    """Who took part, in the order in which they were computed."""
    losses: NDArray[np.float64]
    is_counted: NDArray[np.bool_]
    failed: dict[int, str]
    """Client → its traceback."""
    samples: int
    loss: float
    compute_seconds: float
    wait_seconds: float
    transfer_seconds: float
    bytes_up: int
    bytes_down: int
    seconds: float = 0.0
    late: int = 0
    rejected: list[int] = field(default_factory=list)


class Telling:
    """On rank 0."""

    def __init__(self, reporter: AnyReporter, federation: Federation) -> None:
        self._reporter, self._federation = reporter, federation

    def tell_split(self) -> None:
        """Once: how the data lie."""
        sizes = self._federation.divided.sizes
        self._reporter.event(
            "data.prepared",
            identity=self._federation.prepared.identity,
            samples=int(sizes.sum()),
            validation_samples=len(self._federation.divided.owners["validation"]),
            clients={"least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max())},
        )

    def tell(self, round_: int, told: Told) -> None:
        broken = [c for c in told.clients[~told.is_counted].tolist() if c not in told.failed]
        self._reporter.log(
            round_,
            loss=told.loss,
            round_seconds=told.seconds,
            step_seconds=told.seconds,
            compute_seconds=told.compute_seconds,
            wait_seconds=told.wait_seconds,
            transfer_seconds=told.transfer_seconds,
            mib_up=told.bytes_up / MIB,
            mib_down=told.bytes_down / MIB,
            trained=float(told.is_counted.sum()),
            late=float(told.late),
            dropped=float(len(told.failed)),
            rejected=float(len(broken) + len(told.rejected)),
            **spread("client_loss", told.losses[told.is_counted]),
        )
        for client, text in told.failed.items():
            self._reporter.event("client.dropped", step=round_, client=client, traceback=text)
        for client in broken:
            self._reporter.event("client.broken", step=round_, client=client)

    def tell_judged(self, round_: int, judged: Judged) -> None:
        means = {f"validation_{name}" if name == "loss" else name: mean for name, mean in judged.means.items()}
        spreads = spread("client_accuracy", judged.by_client["accuracy"]) if "accuracy" in judged.by_client else {}
        self._reporter.log(round_, **means, **spreads)
        print(f"round {round_}  " + "  ".join(f"{name} {mean:.4f}" for name, mean in means.items()), flush=True)

    def close(self) -> None:
        self._reporter.flush()


def spread(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    """The distribution of something over clients, as series: of thousands of clients there can't be one each."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {}
    found = np.quantile(known, list(QUANTILES.values()))
    return {f"{name}_{which}": float(value) for which, value in zip(QUANTILES, found, strict=True)}
