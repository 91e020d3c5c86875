"""Read node states as sinfo or the REST API write them: in service or not, and why no new job starts. No Django."""

from __future__ import annotations

from functools import lru_cache

# Node states in which no new job starts, as sinfo or the REST API write them, and why.
OUT = {
    "down": "down", "drain": "drained", "drained": "drained", "drng": "draining", "draining": "draining",
    "fail": "failing", "failg": "failing", "failing": "failing", "error": "failing", "unknown": "unknown to Slurm",
    "unk": "unknown to Slurm", "future": "not set up", "futr": "not set up", "inval": "misconfigured",
    "invalid_reg": "misconfigured", "blocked": "blocked", "no_respond": "not responding",
    "not_responding": "not responding", "perfctrs": "taken by the administrators", "npc": "taken by the administrators",
}  # fmt: skip
PASSING = {
    "completing": "being cleaned up", "comp": "being cleaned up", "reboot": "rebooting", "reboot_issued": "rebooting",
    "reboot_requested": "rebooting", "boot": "rebooting", "power_down": "powering down", "pow_dn": "powering down",
    "powering_down": "powering down", "power_up": "powering up", "powering_up": "powering up", "pow_up": "powering up",
}  # fmt: skip
CLOSED = {"maint": "reserved", "resv": "reserved", "reserved": "reserved", "maintenance": "reserved"}
DRAINED = frozenset({"drain", "drained", "draining", "drng"})
WITH_JOBS = frozenset({"draining", "drng", "completing", "comp", "mixed", "mix", "allocated", "alloc"})
DOWN_BY_ITSELF = (
    "not responding", "node unexpectedly rebooted", "node silently failed and came back", "resumetimeout reached",
    "reboot timed out",
)  # fmt: skip
"""Beginnings of the reasons that slurmctld writes where it takes a node down without anybody's order."""
MARKS = {"*": "no_respond", "#": "powering_up", "%": "powering_down", "$": "maint", "@": "reboot", "^": "reboot_issued"}


def state_words(state: str) -> list[str]:
    """Split a node's state into its parts: "idle+drain" and "down*" have two."""
    parts = state.lower().replace("+", " ").split()
    found = []
    for part in parts:
        word = part.rstrip("*~#%$@^!-+")
        found += [word, *(MARKS[mark] for mark in part[len(word) :] if mark in MARKS)]
    return found


UNREACHABLE = frozenset({"down", "no_respond", "not_responding", "unknown"})
"""Words of states in which the scheduler does not reach the node."""


@lru_cache(maxsize=512)
def closed_reason(state: str) -> str:
    """Return the one-word reason why no new job starts on a node in this state; "" if one may."""
    words = state_words(state)
    for table in (OUT, PASSING, CLOSED):
        for word in words:
            if word in table:
                return table[word]
    return ""


@lru_cache(maxsize=512)
def is_rebooting(state: str) -> bool:
    """Return whether the scheduler reboots the node: Slurm's DOWN+REBOOT_ISSUED until it is back or ResumeTimeout."""
    return any(PASSING.get(word) == "rebooting" for word in state_words(state))


@lru_cache(maxsize=512)
def runs_jobs(state: str) -> bool:
    """Return whether a node in this state has jobs, or has to clean up after some: draining, mixed, completing …"""
    return any(word in WITH_JOBS for word in state_words(state))


def is_drained(state: str) -> bool:
    """Return whether a node in this state is drained or draining, whatever else it is."""
    return not DRAINED.isdisjoint(state_words(state))


def is_standby(reason: str) -> bool:
    """Return whether a drained node is one of Vigil's hot spares, by the reason in the scheduler."""
    return reason.startswith("[node] hot spare")


def is_down_by_itself(reason: str) -> bool:
    """Return whether Slurm took a node that is down out of service by itself, by the reason that it writes then."""
    return reason.lower().startswith(DOWN_BY_ITSELF)


@lru_cache(maxsize=512)
def is_drained_without_jobs(state: str) -> bool:
    """Return whether drained is all that a node is, and no job runs there: "idle+drain", not "down+drain"."""
    words = state_words(state)
    reasons = {OUT.get(word) or PASSING.get(word) for word in words} - {None}
    return reasons == {"drained"} and not runs_jobs(state) and "powered_down" not in words


def is_in_state(state: str, wanted: str) -> bool:
    """Return whether the state is the wanted one, perhaps with a flag: "drained+not_responding" is "drained"."""
    return state == wanted or state.startswith(f"{wanted}+")


@lru_cache(maxsize=512)
def is_set_up(state: str) -> bool:
    """Return whether the machine exists: slurm.conf may name nodes that do not yet (State=FUTURE)."""
    return {"future", "futr"}.isdisjoint(state_words(state))


@lru_cache(maxsize=512)
def is_in_service(state: str) -> bool:
    """Return whether a node accepts jobs, or will again by itself: not drained, down or failing."""
    return not any(word in OUT for word in state_words(state))
