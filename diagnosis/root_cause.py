"""Which of several roots began it: rules that follow one another, hardware first, then time and kind.

Where clocks or lines order two signs, the earlier counts; where nothing does, the one that may have brought about the
other. What ranks see of each other, and what a scheduler only ends, comes after whatever has a cause of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from diagnosis.case import Case, in_order
from diagnosis.signs.sign import Sign, code_of

HARDWARE_BEFORE_S = 600.0  # the first error that a program prints of a GPU that failed
CLOCKS_S = 2.0  # stamps in two logs closer than this order nothing
CLOCKS_APART_S = 120.0  # and up to here only what is of one kind, as clocks of machines go apart

_FINAL = ("scheduler.time_limit", "scheduler.preempted", "scheduler.node_fail", "scheduler.cancelled")
# What ranks see of others that failed, or never came.
_CONSEQUENCES = frozenset({"network.fabric", "collective.timeout", "rendezvous.failed"})
_OF_DEVICES = re.compile(r"(?i)\b(?:cuda|gpus?|bf16|devices?|nccl|accelerator)\b")
REPORTED = "reported"  # of a sign: the program reported it in its series (jobs.postmortem.evidence.series)
LOSS = frozenset({"course", REPORTED})  # what the loss was, by the log or by the reports
_OF_NUMBERS = re.compile(
    r"(?i)\b(?:nan|inf|infinite|non-?finite|not finite|isfinite|diverg\w*|explod\w*|loss|grad\w*)\b"
)
_STOP = re.compile(r"(?i)\bSIGTERM\b|\bsignal 15\b|\bpreempt\w*")


def hardware(candidates: Sequence[Sign]) -> Sign | None:
    """A GPU's own failure, told by the kernel, from up to ten minutes before what the program printed first."""
    kernel = [
        sign
        for sign in candidates
        if sign.scope == "kernel"
        and sign.cause.startswith(("gpu.", "numerics."))
        and not _is_xid_echo(sign, candidates)
    ]
    program = [sign.at for sign in candidates if sign.scope != "kernel" and sign.at is not None]
    for sign in kernel:
        if sign.at is None or not program or sign.at >= min(program) - HARDWARE_BEFORE_S:
            return sign
    return None


def _is_xid_echo(sign: Sign, candidates: Sequence[Sign]) -> bool:
    """A context switch that times out within a minute after a program's own fault follows from that."""
    if sign.entry is None or not sign.entry.name.startswith("xid.109"):
        return False
    own = [one for one in candidates if one.cause == "program.illegal_access" and one.scope == "kernel"]
    return any(one.file == sign.file and one.line < sign.line and _within_a_minute(one, sign) for one in own)


def _within_a_minute(one: Sign, other: Sign) -> bool:
    if one.prefix.up is not None and other.prefix.up is not None:
        return abs(other.prefix.up - one.prefix.up) <= 60
    return one.at is None or other.at is None or abs(other.at - one.at) <= 60


def earliest(candidates: Sequence[Sign], case: Case) -> Sign:
    """Where it began: the first by line in one log, by time over several; what only ends a run comes after others."""
    real = [sign for sign in candidates if not ends_only(sign)] or list(candidates)
    specific = [sign for sign in real if not sign.is_generic] or real
    if any(_is_telling(sign) for sign in specific):  # then the loss only shows what came of it
        specific = [sign for sign in specific if sign.of not in LOSS]
    if any(_is_unrelated_exception(sign) or _covers_reports(sign) for sign in specific):
        specific = [sign for sign in specific if sign.of != REPORTED]
    blamed = _blamed(case)
    named = [sign for sign in specific if sign.rank in blamed] if blamed else []
    first = _first(named or specific)
    if first.traceback is not None and first.entry is None:  # of numbers, by its words: the reports say since when
        first = next((sign for sign in specific if sign.of == REPORTED), first)
    if first.traceback is not None and first.entry is None:  # it says less than whatever has a name beside it
        beside = [sign for sign in real if sign.prefix.stream == first.prefix.stream and sign.file == first.file]
        told = [sign for sign in beside if _is_telling(sign)] or [sign for sign in beside if sign.entry is not None]
        first = _first([sign for sign in told if sign.cause not in _CONSEQUENCES] or [first])
    if first.cause in _CONSEQUENCES:
        first = _first([sign for sign in specific if _brings_about(sign, first)] or [first])
    if not ends_only(first):
        ended = [sign for sign in candidates if ends_only(sign)]
        if any(is_before(sign, first) for sign in ended) or (ended and _was_told_to_stop(first, case)):
            first = _first([sign for sign in ended if is_before(sign, first)] or ended)
    return _named_by_hardware(first, candidates)


def _first(signs: Sequence[Sign]) -> Sign:
    first = signs[0]
    for sign in signs[1:]:
        if is_before(sign, first):
            first = sign
    return first


def _brings_about(sign: Sign, first: Sign) -> bool:
    """Whether it may have brought about what other ranks see: it names its own cause, and no clock says later."""
    is_same = sign.rank == first.rank if sign.rank is not None else sign.prefix.stream == first.prefix.stream
    if sign.cause in _CONSEQUENCES or not _is_telling(sign) or is_same:
        return False
    is_later = sign.prefix.stamp is not None and first.prefix.stamp is not None and sign.file == first.file
    return not is_later or (sign.prefix.stamp or 0.0) - (first.prefix.stamp or 0.0) <= CLOCKS_S


def _was_told_to_stop(first: Sign, case: Case) -> bool:
    """Whether the processes had been sent SIGTERM before: what goes wrong as they save and leave is no cause."""
    told = [sign for sign in case.echoes if sign.file == first.file and _STOP.search(sign.text)]
    return any(sign.line < first.line for sign in told)


def warned_of(first: Sign, roots: Sequence[Sign]) -> Sign:
    """What a driver was warned of before, where the program then only finds that it has no GPU."""
    if first.cause.startswith("program.") and _OF_DEVICES.search(first.text):
        for sign in roots:
            if (
                sign.prefix.level == "warning"
                and sign.cause.startswith(("gpu.", "environment.driver"))
                and is_before(sign, first)
            ):
                return sign
    return first


def _named_by_hardware(first: Sign, candidates: Sequence[Sign]) -> Sign:
    """What a program or its peers see of a node or a GPU that is broken, by the word of whoever names that."""
    if first.cause in _CONSEQUENCES or first.cause == "storage.io":
        lost = next((sign for sign in candidates if sign.cause == "scheduler.node_fail"), None)
        if lost is not None:
            return lost
    if first.cause in _CONSEQUENCES or first.cause == "program.illegal_access":
        named = (sign for sign in candidates if sign.cause.startswith("gpu.") and not sign.is_generic)
        return next((sign for sign in named if not _is_xid_echo(sign, candidates)), first)
    if first.cause == "numerics.nan":  # what climbed before it was not a number has run away
        return next((sign for sign in candidates if sign.of in LOSS and sign.cause == "numerics.divergence"), first)
    return first


def _is_unrelated_exception(sign: Sign) -> bool:
    """Return whether it is an exception unrelated to numbers: then that ended the program."""
    return sign.traceback is not None and sign.traceback.is_whole and not _OF_NUMBERS.search(sign.traceback.text)


def _covers_reports(sign: Sign) -> bool:
    """Return whether the log or a guard names what the reports show: then the reports only confirm it."""
    return sign.of != REPORTED and sign.cause.startswith("numerics.")


def _is_telling(sign: Sign) -> bool:
    return sign.entry is not None and not sign.is_generic


def _blamed(case: Case) -> frozenset[int]:
    """Who failed first, by the word of whoever started the ranks: torchrun's summary, else the first end by srun."""
    told = [sign for sign in case.exits if sign.groups.get("first") and sign.rank is not None]
    if not told:
        bad = [
            sign for sign in sorted(case.exits, key=in_order) if code_of(sign) not in {0, 143} and sign.rank is not None
        ]
        told = bad[:1]
    return frozenset(sign.rank for sign in told if sign.rank is not None)


def ends_only(sign: Sign) -> bool:
    return sign.cause in _FINAL


def is_before(one: Sign, other: Sign) -> bool:
    if one.file == other.file:
        return one.line < other.line
    apart = abs(one.at - other.at) if one.at is not None and other.at is not None else None
    if apart is not None and apart > CLOCKS_APART_S:
        return one.at < other.at  # type: ignore[operator]
    if _rank_of_kind(one) != _rank_of_kind(other):
        return _rank_of_kind(one) > _rank_of_kind(other)
    return apart is not None and apart > CLOCKS_S and one.at < other.at  # type: ignore[operator]


def _rank_of_kind(sign: Sign) -> int:
    """Of two that no clock orders, which is more likely to have brought about the other."""
    if ends_only(sign):
        return 0
    if sign.scope == "kernel":
        return 4
    domain = sign.cause.partition(".")[0]
    if domain in {"gpu", "memory", "storage"}:
        return 3
    if sign.entry is not None and not sign.is_generic:
        return 2
    return 1
