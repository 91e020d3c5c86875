"""Recognise Slurm's hold of a job that it could not launch; only the description tells it from a person's. Pure."""

from __future__ import annotations

from collections.abc import Sequence

LAUNCH_FAILED = "launch_failed_requeued_held"
MOST_NAMED = 8  # nodes in a reason


def is_launch_failed(reason: str) -> bool:
    return reason.startswith(LAUNCH_FAILED)


def with_nodes(reason: str, nodes: Sequence[str]) -> str:
    """Add the nodes on which it failed: "launch_failed_requeued_held, dgx03"."""
    return ", ".join([LAUNCH_FAILED, *nodes[:MOST_NAMED]]) if reason == LAUNCH_FAILED else reason


def nodes_of(reason: str) -> list[str]:
    """Return the nodes that such a reason names."""
    return reason.split(", ")[1:] if is_launch_failed(reason) else []
