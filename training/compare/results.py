"""Summarise the runs of a comparison: medians, paired ratios, and differences of losses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from training.compare.running import CandidateRun


@dataclass(frozen=True)
class CandidateResult:
    """The runs of one candidate, in the order of rounds; empty if all failed."""

    name: str
    changes: str
    runs: list[CandidateRun]
    failure: str = ""

    @property
    def rates(self) -> list[float]:
        """Tokens or samples per second of each rank, by round."""
        return [run.units_per_step / run.seconds / len(run.peak_bytes) for run in self.runs]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def step_seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def peak_bytes(self) -> int:
        """Highest peak of any rank in any round."""
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
    """`results` are in the requested order; the first candidate that ran is the baseline."""

    name: str
    machine: str
    ranks: int
    steps: int
    rounds: int
    seed: int
    results: list[CandidateResult] = field(default_factory=list)

    @property
    def ran(self) -> list[CandidateResult]:
        return [result for result in self.results if result.runs]

    @property
    def baseline(self) -> CandidateResult:
        return self.ran[0]

    def ratios(self, result: CandidateResult) -> list[float]:
        """Return the speed relative to the baseline in the same round."""
        baseline = {run.round: rate for run, rate in zip(self.baseline.runs, self.baseline.rates, strict=True)}
        rounds = zip(result.runs, result.rates, strict=True)
        return [rate / baseline[run.round] for run, rate in rounds if run.round in baseline]

    def loss_difference(self, result: CandidateResult) -> tuple[float, int]:
        """Return the largest difference from the baseline's loss at equal steps, and the step."""
        return _difference(result.losses, self.baseline.losses)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of compare.json."""
        return {
            "format": "vigil-compare",
            "version": 1,
            "name": self.name,
            "machine": self.machine,
            "ranks": self.ranks,
            "steps": self.steps,
            "rounds": self.rounds,
            "seed": self.seed,
            "results": [self._result_dict(result) for result in self.results],
        }

    def _result_dict(self, result: CandidateResult) -> dict[str, Any]:
        content: dict[str, Any] = {"name": result.name, "changes": result.changes, "failure": result.failure or None}
        if not result.runs:
            return content
        difference, step = self.loss_difference(result)
        unit = result.runs[0].unit
        return content | {
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
            "rounds_agree_within": largest_loss_difference(result.runs),
            "runs": [run.to_dict() for run in result.runs],
        }


def largest_loss_difference(runs: Sequence[CandidateRun]) -> float:
    """Return the largest difference of losses at equal steps between the rounds of one candidate."""
    return max((_difference(run.losses, runs[0].losses)[0] for run in runs), default=0.0)


def _difference(losses: dict[int, float], others: dict[int, float]) -> tuple[float, int]:
    steps = sorted(set(losses) & set(others))
    return max(((abs(losses[step] - others[step]), step) for step in steps), default=(float("nan"), 0))
