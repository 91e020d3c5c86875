"""Recognise Slurm's hold on a job that it failed to launch. Pure.

Only the state description distinguishes it from a hold that a person placed.
"""

from __future__ import annotations

from collections.abc import Sequence

LAUNCH_FAILED = "launch_failed_requeued_held"
MAX_NODES_IN_REASON = 8


def is_launch_failed(reason: str) -> bool:
    return reason.startswith(LAUNCH_FAILED)


def with_nodes(reason: str, nodes: Sequence[str]) -> str:
    """Append the nodes on which the launch failed: "launch_failed_requeued_held, dgx03"."""
    return ", ".join([LAUNCH_FAILED, *nodes[:MAX_NODES_IN_REASON]]) if reason == LAUNCH_FAILED else reason


def nodes_of(reason: str) -> list[str]:
    """Return the nodes that a reason made by `with_nodes` lists."""
    return reason.split(", ")[1:] if is_launch_failed(reason) else []
