"""Store plain values that a run continues from after a resume, in a checkpoint's manifest by the name of each part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from training.manifest import Manifest


class Stateful(Protocol):
    """A part of the trainer that continues from plain values after a resume: guards, the loss scale, the cadence.

    The methods are named as in torch's Stateful, which stores tensors.

    The values of rank 0 are restored on all ranks, on any layout. A rank's own tensors (factors, residuals) belong
    into the state instead, under "comm", with the rank in their names; where they do not fit, they start from
    scratch.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the values: numbers, text, lists and dicts."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned before the save; {} if nothing was saved, or by an older version of it."""


def collect_state(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the content of ManifestFields.state: the values of each part by its name."""
    return {name: part.state_dict() for name, part in parts.items()}


def restore_state(parts: Mapping[str, Stateful], start: Manifest) -> None:
    for name, part in parts.items():
        values = start.state.get(name)
        part.load_state_dict(values if isinstance(values, dict) else {})
