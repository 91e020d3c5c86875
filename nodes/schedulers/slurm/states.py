"""Reduce Slurm's job and node states to the few that Vigil uses. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nodes.schedulers.base import ALIVE, ENDED, UNKNOWN

# Flags in addition to a base state, or in older versions instead of it; the first match decides.
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
WAIT_REASONS = {
    "requeue_hold": "Requeued and held until somebody releases it.",
    "special_exit": "Requeued in a special state and held until somebody releases it.",
    "configuring": "Its nodes are being prepared.",
    "power_up_node": "Its nodes are being powered up.",
}
# sinfo shows one word for a node: these flags take precedence over the base state, in this order.
_NODE_FLAGS = (
    "reboot_issued", "reboot_requested", "powering_up", "powering_down", "power_down", "powered_down", "invalid_reg",
    "not_responding", "fail", "maintenance", "reserved", "planned",
)  # fmt: skip
# A node with one of these cannot return to service by an undrain alone.
_OBSTACLES = tuple(flag for flag in _NODE_FLAGS if flag not in {"maintenance", "reserved", "planned"})
_SYNONYMS = {
    "maint": "maintenance",
    "invalid": "invalid_reg",
    "power_up": "powering_up",
    "no_respond": "not_responding",
}


def job_state(state_words: Sequence[str]) -> str:
    """Return one state of ALIVE or ENDED, or UNKNOWN: ["COMPLETED", "COMPLETING"] is still "completing"."""
    words = {word.lower() for word in state_words}
    for flag, state in _JOB_FLAGS.items():
        if flag in words:
            return state
    return next((word for word in sorted(words) if word in ALIVE | ENDED), UNKNOWN)


def wait_reason(state_words: Sequence[str]) -> str:
    """Return why a pending job waits, as far as its flags say; "" if they do not."""
    return next((WAIT_REASONS[word.lower()] for word in state_words if word.lower() in WAIT_REASONS), "")


def ended_before(state_words: Sequence[str]) -> str:
    """Return why a requeued run ended: preempted, node_fail …; "" for a plain requeue."""
    words = {word.lower() for word in state_words}
    return next((word for word in sorted(words) if word in ENDED and word != "completed"), "")


def node_state(state_words: Sequence[str]) -> str:
    """Return one word: a draining node is "drained" once nothing runs on it; one that is down stays "down".

    What else keeps a drained node out of service follows: "drained+not_responding", "drained+powered_down". Slurm calls
    a node down while it reboots it: that is "down+reboot_issued", as the node comes back by itself.
    """
    words = {_SYNONYMS.get(word.lower(), word.lower()) for word in state_words}
    base = next(
        (word for word in ("down", "error", "future", "idle", "mixed", "allocated") if word in words), "unknown"
    )
    if base in {"down", "error", "future"}:
        if base == "down" and "reboot_issued" in words:
            return "down+reboot_issued"
        return "down" if base == "error" else base
    if "drain" in words:
        state = "draining" if base in {"mixed", "allocated"} or "completing" in words else "drained"
        obstacle = next((flag for flag in (*_OBSTACLES, "unknown") if flag in words), "")
        return f"{state}+{obstacle}" if obstacle else state
    for flag in _NODE_FLAGS:
        if flag in words and not (flag in {"reserved", "planned"} and base in {"mixed", "allocated"}):
            return flag
    return "completing" if "completing" in words and base == "idle" else base
