"""Write reports, and read which of them have arrived."""

from __future__ import annotations

from pathlib import Path

from tests.training.intake import Server
from training.reporting.reporter import Reporter


def reporter_of(attempt: Path, rank: int = 0, *, incarnation: int = 0, node: str = "dgx01") -> Reporter:
    return Reporter(attempt, rank=rank, incarnation=incarnation, node=node, flush_seconds=0.01)


def losses(server: Server) -> list[tuple[int, int, float]]:
    """Return (rank, step, value) of every loss received, in order."""
    return sorted((rank, step, value) for (_, _, rank, name, step), value in server.intake.points if name == "loss")
