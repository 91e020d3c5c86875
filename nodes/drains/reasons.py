"""Read a node's reason in the scheduler: who took it out of service, why, and what to do. No Django.

The texts are those that Slurm, LBNL's Node Health Check and health checks of sites write. Slurm: `Kill task failed` and
`Prolog error` come from slurmd, the others from slurmctld. A health check's reason is set by root, like a person's with
sudo: only its wording tells them apart.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum

from nodes.health.requesters import BURN_IN, MAINTENANCE_PREFIX, SPARE
from vigil_core.untrusted import line

MAX_CHARACTERS = 500
AUTOMATIC_USERS = frozenset({"", "root", "slurm"})
"""Users whom Slurm names for what nobody ordered; also people with sudo."""
_REQUESTER = re.compile(r" \(vigil: ([^()]+)\)\Z")
_TAG = re.compile(r"\[(node|user)(?:_problem)?\]\s*", re.IGNORECASE)
_STAMP = re.compile(r" \[[\w.-]+@\d{4}-\d\d-\d\dT[\d:]+\]\Z")  # as `scontrol show node` writes it


class DrainHolder(StrEnum):
    """Who took a node out of service."""

    PERSON = "person"
    RULE = "rule"
    SPARE = "spare"
    MAINTENANCE = "maintenance"
    BURN_IN = "burn-in"
    NHC = "nhc"
    HEALTH_CHECK = "health check"
    SLURM = "slurm"
    UNKNOWN = "unknown"


class DrainCause(StrEnum):
    """What a reason means, as far as its wording says."""

    KILL_FAILED = "kill failed"
    NOT_RESPONDING = "not responding"
    PROLOG = "prolog"
    EPILOG = "epilog"
    LAUNCH = "launch"
    REBOOTED = "rebooted"
    REBOOT_REQUESTED = "reboot requested"
    FEWER_GPUS = "fewer gpus"
    LESS_MEMORY = "less memory"
    CONFIGURATION = "configuration"
    POWER = "power"
    CHECK_FAILED = "check failed"
    USER_PROBLEM = "user problem"
    OTHER = "other"


@dataclass(frozen=True)
class DrainReason:
    """A reason in its parts. `requester` is whom Vigil named in it: a person or a health rule; else empty."""

    text: str
    holder: DrainHolder
    cause: DrainCause
    requester: str = ""
    about: str = ""
    """"node" or "user": what a tag at its beginning says the problem is; empty without a tag."""

    @property
    def advice(self) -> str:
        return ADVICE[self.cause]


ADVICE = {
    DrainCause.KILL_FAILED: "Find the process that could not be killed; it usually waits for a disk or a file system. "
    "Undrain the node once it is gone, or reboot.",
    DrainCause.NOT_RESPONDING: "Check the node's console, network and slurmd.",
    DrainCause.PROLOG: "Read the prolog's output in slurmd's log on the node, then undrain it.",
    DrainCause.EPILOG: "Read the epilog's output in slurmd's log on the node, then undrain it.",
    DrainCause.LAUNCH: "slurmd could not start or end a job: read its log on the node, then undrain it.",
    DrainCause.REBOOTED: "Find out why it rebooted (power, kernel, a person), then undrain it.",
    DrainCause.REBOOT_REQUESTED: "It returns by itself after the reboot. If it does not, check its console.",
    DrainCause.FEWER_GPUS: "Compare nvidia-smi with Gres in slurm.conf: a GPU is missing, or the driver is not loaded.",
    DrainCause.LESS_MEMORY: "Compare slurmd -C with slurm.conf: a memory module may have failed.",
    DrainCause.CONFIGURATION: "Compare slurmd -C with the node's line in slurm.conf.",
    DrainCause.POWER: "The node did not come up in time: check its power and console.",
    DrainCause.CHECK_FAILED: "Correct what the check names. Undrain the node if the check does not do so by itself.",
    DrainCause.USER_PROBLEM: "Find out what the user's programs left behind, and talk to the user.",
    DrainCause.OTHER: "",
}

# Beginnings of the reasons that Slurm sets by itself (slurmctld and slurmd, 20.11 to 25.05).
_SLURM = (
    ("kill task failed", DrainCause.KILL_FAILED),
    ("not responding", DrainCause.NOT_RESPONDING),
    ("prolog/epilog failure", DrainCause.PROLOG),
    ("prolog error", DrainCause.PROLOG),
    ("epilog error", DrainCause.EPILOG),
    ("batch job complete failure", DrainCause.LAUNCH),
    ("duplicate jobid", DrainCause.LAUNCH),
    ("node unexpectedly rebooted", DrainCause.REBOOTED),
    ("node silently failed and came back", DrainCause.REBOOTED),
    ("reboot asap", DrainCause.REBOOT_REQUESTED),
    ("reboot requested", DrainCause.REBOOT_REQUESTED),
    ("reboot issued", DrainCause.REBOOT_REQUESTED),
    ("reboot timed out", DrainCause.POWER),
    ("scheduled reboot", DrainCause.REBOOT_REQUESTED),
    ("resumetimeout reached", DrainCause.POWER),
    ("powered down after", DrainCause.POWER),
    ("gres/gpu count", DrainCause.FEWER_GPUS),
    ("low realmemory", DrainCause.LESS_MEMORY),
    ("low tmpdisk", DrainCause.CONFIGURATION),
    ("low cpus", DrainCause.CONFIGURATION),
    ("low socket", DrainCause.CONFIGURATION),
    ("gres/", DrainCause.CONFIGURATION),
    ("switch_g_job_postfini failed", DrainCause.LAUNCH),
)
_VIGIL = (
    (DrainHolder.SPARE, SPARE),
    (DrainHolder.MAINTENANCE, MAINTENANCE_PREFIX),
    (DrainHolder.BURN_IN, BURN_IN),
)
"""Names under which Vigil itself drains nodes, besides those of its rules."""
_CHECKS = re.compile(r"checknode\(|health ?check|\[(?:node|user)_problem\]|hc:", re.IGNORECASE)


def read_reason(reason: str, set_by: str = "", rules: Container[str] = frozenset()) -> DrainReason:
    """Return the parts of a reason. `set_by` is the user whom the scheduler names; `rules` are names of health rules.

    >>> read_reason("NHC: check_fs_mount:  /scratch not mounted", "root").holder
    <DrainHolder.NHC: 'nhc'>
    """
    text, requester = _without_requester(_STAMP.sub("", line(reason, MAX_CHARACTERS).strip()))
    tag = _TAG.match(text)
    about = tag[1].lower() if tag else ""
    holder, cause = _automatic_holder(text, requester or set_by, rules)
    if about == "user" and cause == DrainCause.OTHER:
        cause = DrainCause.USER_PROBLEM
    return DrainReason(text, holder, cause, requester, about)


def _without_requester(text: str) -> tuple[str, str]:
    """Split off whom Vigil appended. Slurm's adapter does so already; the local scheduler reports the whole text."""
    found = _REQUESTER.search(text)
    return (text[: found.start()], found[1]) if found else (text, "")


def _automatic_holder(text: str, set_by: str, rules: Container[str]) -> tuple[DrainHolder, DrainCause]:
    """Return whose drain it is: first by who set it, then by its wording."""
    user, low = set_by.partition("(")[0], text.lower()
    for holder, beginning in _VIGIL:
        if set_by.startswith(beginning):
            return holder, DrainCause.OTHER
    if set_by in rules:
        return DrainHolder.RULE, DrainCause.OTHER
    for beginning, cause in _SLURM:
        if low.startswith(beginning):
            return DrainHolder.SLURM, cause
    if low.startswith("nhc:"):
        return DrainHolder.NHC, DrainCause.CHECK_FAILED
    if _CHECKS.match(text):
        is_of_user = low.startswith("[user")
        return DrainHolder.HEALTH_CHECK, DrainCause.OTHER if is_of_user else DrainCause.CHECK_FAILED
    is_person = bool(text) and user not in AUTOMATIC_USERS
    return DrainHolder.PERSON if is_person else DrainHolder.UNKNOWN, DrainCause.OTHER
