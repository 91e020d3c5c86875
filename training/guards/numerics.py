"""Define how a run ends if its numbers cannot be trusted; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NumericsCause = Literal["nonfinite", "divergence", "corruption"]


@dataclass(frozen=True)
class Trouble:
    """A reason to end the run that a rank's guards have found."""

    cause: NumericsCause
    step: int
    what: str
    rank: int
    is_local: bool = False
    """Whether this rank's own loss was not finite; the gradient norm is computed over all ranks."""


class NumericsError(RuntimeError):
    """Ends the attempt: restarting the ranks from the same state would give the same result (protocols.md §1).

    The message is one line that begins with `numerics.<cause>:`, by which the portal recognises it.
    """

    def __init__(self, cause: NumericsCause, message: str) -> None:
        super().__init__(f"numerics.{cause}: {message}")
        self.cause = cause
