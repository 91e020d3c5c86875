"""Define the kinds of jobs: what each counts, and what can be done with it. No Django."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """A job's kind. Below its pages a round is treated as a step: both count from 1 and have checkpoints."""

    name: str
    unit: str = "step"
    """The unit of its progress: "step" or "round"."""
    length: str = ""
    """The field of [run] that has the number of units; "": only its program knows."""
    trains: bool = False
    """Whether Vigil's trainer runs it: it reports, saves by a cadence, and can be continued from a checkpoint."""
    profiles: bool = False
    """Whether its steps can be profiled, and are classified by what limits them."""
    exports: bool = False
    """Whether the weights of its checkpoints can be exported."""

    expected_series: str = "*"
    """Series, separated by blanks, that get a chart on its page once they are reported; "*": all."""

    def length_of(self, spec: Mapping[str, Any]) -> int | None:
        """Return how many steps or rounds a specification (plain values) asks for; None if unknown."""
        run = spec.get("run") if self.length else None
        length = run.get(self.length) if isinstance(run, dict) else None
        return length if isinstance(length, int) else None

    @property
    def units(self) -> str:
        return f"{self.unit}s"


ALL = (
    JobKind(name="distributed", length="steps", trains=True, profiles=True, exports=True, expected_series=""),
    JobKind(name="federated", unit="round", length="rounds", trains=True, exports=True, expected_series="accuracy"),
    JobKind(name="script"),
    JobKind(name="attached"),
)
_BY_NAME = {kind.name: kind for kind in ALL}


def by_name(name: str) -> JobKind:
    """Return the kind of that name; for a job of another release, a kind without any abilities."""
    return _BY_NAME.get(name) or JobKind(name=name)
