"""Slurm's words for the states of jobs and nodes, in the few that Vigil follows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nodes.schedulers.base import ALIVE, ENDED, UNKNOWN

# Flags beside, or in older versions instead of, a base state; the first that is there decides.
_JOB_FLAGS = {
    "completing": "completing",
    "stage_out": "completing",
    "requeue_hold": "pending",
    "special_exit": "pending",
    "requeue_fed": "pending",
    "requeued": "pending",
    "configuring": "pending",
    "power_up_node": "pending",
    "stopped": "suspended",
    "resizing": "running",
    "signaling": "running",
    "revoked": "cancelled",
}
HELD = {
    "requeue_hold": "It was requeued and is held until somebody releases it.",
    "special_exit": "It was requeued in a special state and is held until somebody releases it.",
    "configuring": "Its nodes are being prepared.",
    "power_up_node": "Its nodes are being powered up.",
}
# One word for a node, as sinfo shows it: these flags say more than the base state, in this order.
_NODE_FLAGS = (
    "reboot_issued", "reboot_requested", "powering_up", "powering_down", "power_down", "powered_down", "invalid_reg",
    "not_responding", "fail", "maintenance", "reserved", "planned",
)  # fmt: skip
_SAME = {"maint": "maintenance", "invalid": "invalid_reg", "power_up": "powering_up", "no_respond": "not_responding"}


def job_state(told: Sequence[str]) -> str:
    """One word of ALIVE, ENDED or UNKNOWN: ["COMPLETED", "COMPLETING"] is still "completing"."""
    said = {word.lower() for word in told}
    for flag, state in _JOB_FLAGS.items():
        if flag in said:
            return state
    return next((word for word in sorted(said) if word in ALIVE | ENDED), UNKNOWN)


def hold_of(told: Sequence[str]) -> str:
    """What the flags say of one that waits, beyond its reason."""
    return next((HELD[word.lower()] for word in told if word.lower() in HELD), "")


def ended_before(told: Sequence[str]) -> str:
    """Why a run that was requeued ended: preempted, node_fail …; "" if somebody just asked for the requeue."""
    said = {word.lower() for word in told}
    return next((word for word in sorted(said) if word in ENDED and word != "completed"), "")


def node_state(told: Sequence[str]) -> str:
    """One word: drain is "draining" while something runs and "drained" after, a node that is down stays "down"."""
    said = {_SAME.get(word.lower(), word.lower()) for word in told}
    base = next((word for word in ("down", "error", "future", "idle", "mixed", "allocated") if word in said), "unknown")
    if base in {"down", "error", "future"}:
        return "down" if base == "error" else base
    if "drain" in said:
        return "draining" if base in {"mixed", "allocated"} or "completing" in said else "drained"
    for flag in _NODE_FLAGS:
        if flag in said and not (flag in {"reserved", "planned"} and base in {"mixed", "allocated"}):
            return flag
    return "completing" if "completing" in said and base == "idle" else base
