"""Weigh a sign against facts: hardware that the job did not have, or that its machines and scheduler do not report.

A program may print any line, or write it to its folder in the launcher's place. A line that names broken hardware is
less credible if the job had no such hardware, if monitoring of it reported nothing, or if nothing monitored it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diagnosis.case import Case
from diagnosis.signs.sign import PRINTED, Sign

# Facts about an attempt, in `Case.available_sources`.
ATTEMPT = "an attempt's own logs"  # and not logs that somebody collected manually
NO_GPUS = "no GPUs allocated"
GPUS_WATCHED = "an agent on each node since the end"
_SCHEDULER_CAUSES = frozenset({"scheduler.node_fail", "scheduler.launch"})


@dataclass(frozen=True, slots=True)
class Doubt:
    """A fact that contradicts a sign; `factor` multiplies its confidence."""

    text: str
    factor: float
    sets_aside: bool = True
    """Whether a candidate without a doubt is preferred."""


# A factor of 0.5 lowers any confidence below `MIN_CONFIDENCE` (0.96 × 0.5), so the cause is not named; the others only
# weaken it.
_HAD_NO_GPU = Doubt("no GPU was allocated to the job", 0.5)
_NEEDS_NO_DRIVER = Doubt("no GPU was allocated to the job", 0.7)
_NOT_SEEN_BY_AGENTS = Doubt("the agents on its nodes saw no such event", 0.6)
# A launcher does read its node's kernel log, so its report still explains what the program raised.
_NOT_CONFIRMED_BY_AGENTS = Doubt("the agents on its nodes saw no such event", 0.6, sets_aside=False)
_NOT_MONITORED = Doubt("no agent monitored its nodes", 0.85, sets_aside=False)
_UNKNOWN_TO_SCHEDULER = Doubt("the scheduler reports no such event", 0.5)


def doubts_of(sign: Sign, case: Case) -> list[Doubt]:
    """Return what contradicts a sign; an empty list if nothing but the logs is known."""
    doubts = []
    if sign.cause.startswith("gpu."):
        if NO_GPUS in case.available_sources:
            doubts.append(_HAD_NO_GPU)
        if ATTEMPT in case.available_sources and not _machine_confirms(case, "gpu."):
            doubts.append(_hardware_doubt(sign, is_watched=GPUS_WATCHED in case.available_sources))
    elif sign.cause == "environment.driver" and NO_GPUS in case.available_sources:
        doubts.append(_NEEDS_NO_DRIVER)
    elif (
        sign.cause in _SCHEDULER_CAUSES
        and _is_from_log(sign)
        and "scheduler" in case.available_sources
        and not _scheduler_confirms(case, sign)
    ):
        doubts.append(_UNKNOWN_TO_SCHEDULER)
    return doubts


def uncontradicted(candidates: Sequence[Sign], case: Case) -> list[Sign]:
    """Return the candidates that nothing contradicts, or all of them if that leaves none."""
    return [sign for sign in candidates if not any(doubt.sets_aside for doubt in doubts_of(sign, case))] or list(
        candidates
    )


def _hardware_doubt(sign: Sign, *, is_watched: bool) -> Doubt:
    """Return the doubt about a broken GPU that no machine reports."""
    if not is_watched:
        return _NOT_MONITORED
    return _NOT_CONFIRMED_BY_AGENTS if sign.witness == "launcher" else _NOT_SEEN_BY_AGENTS


def _machine_confirms(case: Case, domain: str) -> bool:
    return any(sign.witness == "machine" and sign.cause.startswith(domain) for sign in case.signs)


def _is_from_log(sign: Sign) -> bool:
    """Return whether the sign comes from a log, and not from the launcher or the trainer."""
    return sign.source_kind in {"", PRINTED}


def _scheduler_confirms(case: Case, doubted: Sign) -> bool:
    return any(sign.witness == "scheduler" and sign.cause == doubted.cause for sign in case.signs)
