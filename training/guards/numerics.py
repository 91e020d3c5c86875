"""How a run ends whose numbers can't be trusted any more; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cause = Literal["nonfinite", "divergence", "corruption"]


@dataclass(frozen=True)
class Trouble:
    """What a rank's guards have found."""

    cause: Cause
    step: int
    what: str
    rank: int
    is_own: bool = False
    """Its own loss was not finite; a gradient's norm is all ranks' together."""


class NumericsError(RuntimeError):
    """Ends the attempt: starting the ranks again from the same state would lead to the same (protocols.md §1).

    The message is one line that begins with the cause, `numerics.<cause>:`, which the portal knows it by.
    """

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(f"numerics.{cause}: {message}")
        self.cause = cause
