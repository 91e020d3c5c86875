"""Plain values that a run goes on from after a resume: in a checkpoint's manifest, by the name of who keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from training.manifest import Manifest


class Remembers(Protocol):
    """A part of the trainer that goes on from plain values after a resume: guards, the loss scale, the cadence.

    What rank 0 remembers is what all ranks recall, on any layout. A rank's own tensors (factors, residuals) belong
    into the state instead, under "comm", by names with the rank in them; where they do not fit they are begun anew.
    """

    def remember(self) -> dict[str, Any]:
        """Numbers, text, lists and dicts."""

    def recall(self, told: Mapping[str, Any]) -> None:
        """What `remember` said before the save; {} if nothing did, or an older version of it."""


def remember(parts: Mapping[str, Remembers]) -> dict[str, Any]:
    """What goes into Facts.state: a plain dict by the name of each part."""
    return {name: part.remember() for name, part in parts.items()}


def recall(parts: Mapping[str, Remembers], start: Manifest) -> None:
    for name, part in parts.items():
        told = start.state.get(name)
        part.recall(told if isinstance(told, dict) else {})
