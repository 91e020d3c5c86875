"""The evidence of a verdict, as pages and documents show it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class EvidencePiece:
    """A line of evidence. `link` leads to the log, filtered for it; "" if there is no log."""

    role: str
    where: str
    text: str
    count: int
    link: str
    at: datetime | None = None
    rank: int | None = None
    node: str = ""
