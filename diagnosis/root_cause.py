"""Choose the sign that started a failure among several roots: hardware first, then time, then kind.

Where clocks or line numbers order two signs, the earlier one wins; otherwise the one that may have caused the other.
What ranks observe of each other, and what a scheduler merely ends, comes after any sign with a cause of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from diagnosis.case import Case, chronological
from diagnosis.signs.sign import Sign, exit_code_of

HARDWARE_LEAD_S = 600.0  # a GPU's failure precedes the program's first error by at most this
CLOCK_SKEW_S = 2.0  # closer stamps in two logs have no order
MAX_CLOCK_SKEW_S = 120.0  # up to here only signs of one kind are ordered, as clocks of machines differ

_FINAL = ("scheduler.time_limit", "scheduler.preempted", "scheduler.node_fail", "scheduler.cancelled")
# What ranks observe of others that failed or never arrived.
_CONSEQUENCES = frozenset({"network.fabric", "collective.timeout", "rendezvous.failed"})
_DEVICE_WORDS = re.compile(r"(?i)\b(?:cuda|gpus?|bf16|devices?|nccl|accelerator)\b")
REPORTED_SERIES = "reported"  # `Sign.source_kind` of what the program reported (jobs.postmortem.evidence.series)
LOSS_SOURCES = frozenset({"course", REPORTED_SERIES})  # the loss as the log or the reports show it
_NUMERIC_WORDS = re.compile(
    r"(?i)\b(?:nan|inf|infinite|non-?finite|not finite|isfinite|diverg\w*|explod\w*|loss|grad\w*)\b"
)
_STOP_WORDS = re.compile(r"(?i)\bSIGTERM\b|\bsignal 15\b|\bpreempt\w*")


def hardware_root(candidates: Sequence[Sign]) -> Sign | None:
    """Return a GPU failure reported by the kernel from up to ten minutes before the program's first error, or None."""
    kernel = [
        sign
        for sign in candidates
        if sign.scope == "kernel"
        and sign.cause.startswith(("gpu.", "numerics."))
        and not _is_xid_echo(sign, candidates)
    ]
    program = [sign.at for sign in candidates if sign.scope != "kernel" and sign.at is not None]
    for sign in kernel:
        if sign.at is None or not program or sign.at >= min(program) - HARDWARE_LEAD_S:
            return sign
    return None


def _is_xid_echo(sign: Sign, candidates: Sequence[Sign]) -> bool:
    """Return whether a context-switch timeout (Xid 109) follows a fault of the program's own within a minute."""
    if sign.entry is None or not sign.entry.name.startswith("xid.109"):
        return False
    faults = [fault for fault in candidates if fault.cause == "program.illegal_access" and fault.scope == "kernel"]
    return any(fault.file == sign.file and fault.line < sign.line and _within_a_minute(fault, sign) for fault in faults)


def _within_a_minute(first: Sign, second: Sign) -> bool:
    if first.prefix.uptime is not None and second.prefix.uptime is not None:
        return abs(second.prefix.uptime - first.prefix.uptime) <= 60
    return first.at is None or second.at is None or abs(second.at - first.at) <= 60


def earliest_root(candidates: Sequence[Sign], case: Case) -> Sign:
    """Return the sign that started the failure: first by line within a log, by time across logs.

    What only ends a run, such as a time limit, comes after all other signs. `candidates` must not be empty.
    """
    real = [sign for sign in candidates if not only_ends_run(sign)] or list(candidates)
    specific = [sign for sign in real if not sign.is_generic] or real
    if any(_is_specific(sign) for sign in specific):  # then the loss only shows the consequence
        specific = [sign for sign in specific if sign.source_kind not in LOSS_SOURCES]
    if any(_is_unrelated_exception(sign) or _supersedes_reports(sign) for sign in specific):
        specific = [sign for sign in specific if sign.source_kind != REPORTED_SERIES]
    blamed = _blamed_ranks(case)
    named = [sign for sign in specific if sign.rank in blamed] if blamed else []
    first = _first(named or specific)
    if first.traceback is not None and first.entry is None:  # about numbers: the reports show since when
        first = next((sign for sign in specific if sign.source_kind == REPORTED_SERIES), first)
    if first.traceback is not None and first.entry is None:  # an entry that matches nearby is more specific
        same_stream = [sign for sign in real if sign.prefix.stream == first.prefix.stream and sign.file == first.file]
        named_signs = [sign for sign in same_stream if _is_specific(sign)] or [
            sign for sign in same_stream if sign.entry is not None
        ]
        first = _first([sign for sign in named_signs if sign.cause not in _CONSEQUENCES] or [first])
    if first.cause in _CONSEQUENCES:
        first = _first([sign for sign in specific if _may_have_caused(sign, first)] or [first])
    if not only_ends_run(first):
        ended = [sign for sign in candidates if only_ends_run(sign)]
        if any(is_before(sign, first) for sign in ended) or (ended and _follows_stop_signal(first, case)):
            first = _first([sign for sign in ended if is_before(sign, first)] or ended)
    return _attributed_to_hardware(first, candidates)


def _first(signs: Sequence[Sign]) -> Sign:
    first = signs[0]
    for sign in signs[1:]:
        if is_before(sign, first):
            first = sign
    return first


def _may_have_caused(sign: Sign, first: Sign) -> bool:
    """Return whether a sign may have caused what other ranks observed: it names a cause, and no clock puts it later."""
    is_same = sign.rank == first.rank if sign.rank is not None else sign.prefix.stream == first.prefix.stream
    if sign.cause in _CONSEQUENCES or not _is_specific(sign) or is_same:
        return False
    is_later = sign.prefix.stamp is not None and first.prefix.stamp is not None and sign.file == first.file
    return not is_later or (sign.prefix.stamp or 0.0) - (first.prefix.stamp or 0.0) <= CLOCK_SKEW_S


def _follows_stop_signal(first: Sign, case: Case) -> bool:
    """Return whether the processes had been sent SIGTERM before: an error while they save and leave is not a cause."""
    stops = [sign for sign in case.echoes if sign.file == first.file and _STOP_WORDS.search(sign.text)]
    return any(sign.line < first.line for sign in stops)


def preceding_warning(first: Sign, roots: Sequence[Sign]) -> Sign:
    """Return the driver's earlier warning if the program then only finds that it has no GPU; else `first`."""
    if first.cause.startswith("program.") and _DEVICE_WORDS.search(first.text):
        for sign in roots:
            if (
                sign.prefix.level == "warning"
                and sign.cause.startswith(("gpu.", "environment.driver"))
                and is_before(sign, first)
            ):
                return sign
    return first


def _attributed_to_hardware(first: Sign, candidates: Sequence[Sign]) -> Sign:
    """Return the sign that names the broken node or GPU behind what a program or its peers observed; else `first`."""
    if first.cause in _CONSEQUENCES or first.cause == "storage.io":
        lost = next((sign for sign in candidates if sign.cause == "scheduler.node_fail"), None)
        if lost is not None:
            return lost
    if first.cause in _CONSEQUENCES or first.cause == "program.illegal_access":
        named = (sign for sign in candidates if sign.cause.startswith("gpu.") and not sign.is_generic)
        return next((sign for sign in named if not _is_xid_echo(sign, candidates)), first)
    if first.cause == "numerics.nan":  # a loss that climbed before it became NaN has diverged
        return next(
            (sign for sign in candidates if sign.source_kind in LOSS_SOURCES and sign.cause == "numerics.divergence"),
            first,
        )
    return first


def _is_unrelated_exception(sign: Sign) -> bool:
    """Return whether this is an exception unrelated to numbers; then it ended the program."""
    return sign.traceback is not None and sign.traceback.is_whole and not _NUMERIC_WORDS.search(sign.traceback.text)


def _supersedes_reports(sign: Sign) -> bool:
    """Return whether the log or a guard names what the reported series show; then these only confirm it."""
    return sign.source_kind != REPORTED_SERIES and sign.cause.startswith("numerics.")


def _is_specific(sign: Sign) -> bool:
    return sign.entry is not None and not sign.is_generic


def _blamed_ranks(case: Case) -> frozenset[int]:
    """Return the ranks that failed first according to their launcher.

    From torchrun's summary, else the first exit under srun.
    """
    exits = [sign for sign in case.exits if sign.groups.get("first") and sign.rank is not None]
    if not exits:
        bad = [
            sign
            for sign in sorted(case.exits, key=chronological)
            if exit_code_of(sign) not in {0, 143} and sign.rank is not None
        ]
        exits = bad[:1]
    return frozenset(sign.rank for sign in exits if sign.rank is not None)


def only_ends_run(sign: Sign) -> bool:
    """Return whether the cause is the scheduler's end of a run that had no failure of its own."""
    return sign.cause in _FINAL


def is_before(first: Sign, second: Sign) -> bool:
    """Return whether `first` comes before `second`.

    By line in one file, by clock across files, else by likely causality.
    """
    if first.file == second.file:
        return first.line < second.line
    apart = abs(first.at - second.at) if first.at is not None and second.at is not None else None
    if apart is not None and apart > MAX_CLOCK_SKEW_S:
        return first.at < second.at  # type: ignore[operator]
    if _causal_priority(first) != _causal_priority(second):
        return _causal_priority(first) > _causal_priority(second)
    return apart is not None and apart > CLOCK_SKEW_S and first.at < second.at  # type: ignore[operator]


def _causal_priority(sign: Sign) -> int:
    """Rank a sign by how likely it caused another that no clock orders; higher is likelier."""
    if only_ends_run(sign):
        return 0
    if sign.scope == "kernel":
        return 4
    domain = sign.cause.partition(".")[0]
    if domain in {"gpu", "memory", "storage"}:
        return 3
    if sign.entry is not None and not sign.is_generic:
        return 2
    return 1
