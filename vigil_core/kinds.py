"""Define the kinds of jobs: what each counts, and what can be done with it. No Django."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """A job's kind. Below its pages a round is treated as a step: both count from 1 and have checkpoints."""

    name: str
    counts: str = "step"
    """What it counts, one of it."""
    length: str = ""
    """The field of [run] that says how many; "": only its program knows."""
    trains: bool = False
    """Whether Vigil's own trainer runs it: it reports, saves by a cadence and can be made to run on."""
    profiles: bool = False
    """Whether its steps can be recorded, and are told apart by what bounds them."""
    exports: bool = False
    """Whether the weights of its checkpoints can be taken out."""

    awaits: str = "*"
    """Series that get a chart on its page once they are told, with blanks between; "*": all."""

    def length_of(self, spec: Mapping[str, Any]) -> int | None:
        """Return how many steps or rounds a specification (plain values) asks for; None if unknown."""
        run = spec.get("run") if self.length else None
        length = run.get(self.length) if isinstance(run, dict) else None
        return length if isinstance(length, int) else None

    @property
    def many(self) -> str:
        return f"{self.counts}s"


ALL = (
    JobKind(name="distributed", length="steps", trains=True, profiles=True, exports=True, awaits=""),
    JobKind(name="federated", counts="round", length="rounds", trains=True, exports=True, awaits="accuracy"),
    JobKind(name="script"),
    JobKind(name="attached"),
)
_BY_NAME = {kind.name: kind for kind in ALL}


def of(name: str) -> JobKind:
    """Return the kind of that name; for a job of another release, a kind without any abilities."""
    return _BY_NAME.get(name) or JobKind(name=name)
