"""What the runs of a comparison say together: medians, paired ratios, and by how much losses differ."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from training.compare.running import Run


@dataclass(frozen=True)
class Result:
    """One candidate's. Runs are in the order of their rounds; empty where all failed."""

    name: str
    changes: str
    runs: list[Run]
    failure: str = ""

    @property
    def rates(self) -> list[float]:
        """Tokens or samples a second of each rank, by round."""
        return [run.units_per_step / run.seconds / len(run.peak_bytes) for run in self.runs]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def step_seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def peak_bytes(self) -> int:
        """The peak of the rank that held most, in the round in which it held most."""
        return max(max(run.peak_bytes) for run in self.runs)

    @property
    def stall_seconds(self) -> float:
        return statistics.median(run.stall_seconds for run in self.runs)

    @property
    def write_seconds(self) -> float:
        return statistics.median(run.write_seconds for run in self.runs)

    @property
    def checkpoint_bytes(self) -> int:
        return self.runs[0].checkpoint_bytes

    @property
    def sent_mib(self) -> float | None:
        return self.runs[0].sent_mib

    @property
    def losses(self) -> dict[int, float]:
        return self.runs[0].losses


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`results` in the order asked for; the first that ran is what the others are held against."""

    name: str
    machine: str
    ranks: int
    steps: int
    rounds: int
    seed: int
    results: list[Result] = field(default_factory=list)

    @property
    def ran(self) -> list[Result]:
        return [result for result in self.results if result.runs]

    @property
    def first(self) -> Result:
        return self.ran[0]

    def ratios(self, result: Result) -> list[float]:
        """Speed beside the first one's in the same round."""
        theirs = {run.round: rate for run, rate in zip(self.first.runs, self.first.rates, strict=True)}
        mine = zip(result.runs, result.rates, strict=True)
        return [rate / theirs[run.round] for run, rate in mine if run.round in theirs]

    def loss_difference(self, result: Result) -> tuple[float, int]:
        """The largest at equal steps beside the first one's, and at which step."""
        return _difference(result.losses, self.first.losses)

    def told(self) -> dict[str, Any]:
        """What compare.json says."""
        return {
            "format": "vigil-compare",
            "version": 1,
            "name": self.name,
            "machine": self.machine,
            "ranks": self.ranks,
            "steps": self.steps,
            "rounds": self.rounds,
            "seed": self.seed,
            "results": [self._told(result) for result in self.results],
        }

    def _told(self, result: Result) -> dict[str, Any]:
        told: dict[str, Any] = {"name": result.name, "changes": result.changes, "failure": result.failure or None}
        if not result.runs:
            return told
        difference, step = self.loss_difference(result)
        unit = result.runs[0].unit
        return told | {
            f"{unit}_per_second_per_rank": result.rate,
            "ratios": self.ratios(result),
            "step_seconds": result.step_seconds,
            "peak_bytes": result.peak_bytes,
            "largest_loss_difference": difference,
            "at_step": step,
            "stall_seconds": result.stall_seconds,
            "checkpoint_bytes": result.checkpoint_bytes,
            "write_seconds": result.write_seconds,
            "sent_mib_per_step": result.sent_mib,
            "rounds_agree_within": rounds_differ(result.runs),
            "runs": [run.told() for run in result.runs],
        }


def rounds_differ(runs: Sequence[Run]) -> float:
    """The largest difference of losses at equal steps between a candidate's own rounds."""
    return max((_difference(run.losses, runs[0].losses)[0] for run in runs), default=0.0)


def _difference(mine: dict[int, float], theirs: dict[int, float]) -> tuple[float, int]:
    steps = sorted(set(mine) & set(theirs))
    return max(((abs(mine[step] - theirs[step]), step) for step in steps), default=(float("nan"), 0))
