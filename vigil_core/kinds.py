"""What a kind of job counts, and what can be done with it. Asked here by all who show or change jobs; no Django."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A job's kind. To everything below its pages a round is a step: both are counted from 1, and saved at."""

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
        """How many a specification as plain values asks for; None: nobody knows."""
        run = spec.get("run") if self.length else None
        asked = run.get(self.length) if isinstance(run, dict) else None
        return asked if isinstance(asked, int) else None

    @property
    def many(self) -> str:
        return f"{self.counts}s"


ALL = (
    Kind(name="distributed", length="steps", trains=True, profiles=True, exports=True, awaits=""),
    Kind(name="federated", counts="round", length="rounds", trains=True, exports=True, awaits="accuracy"),
    Kind(name="script"),
    Kind(name="attached"),
)
_BY_NAME = {kind.name: kind for kind in ALL}


def of(name: str) -> Kind:
    """The kind of that name; of a job of another release, one that nothing is known of."""
    return _BY_NAME.get(name) or Kind(name=name)
