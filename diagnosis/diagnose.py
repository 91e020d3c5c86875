"""Name one cause for a failure from everything that was read, with its evidence and what was ruled out.

The rules apply in this order: hardware that failed shortly before the first error; then roots that the run did not
survive, by time where times are known, specific before generic; then echoes alone; then exits of processes alone.
Below `MIN_CONFIDENCE` the cause is unknown.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from diagnosis.case import Case, chronological
from diagnosis.causes import CAUSES, NONE, UNKNOWN, unconfirmed
from diagnosis.corroboration import ATTEMPT, doubts_of, uncontradicted
from diagnosis.root_cause import (
    REPORTED_SERIES,
    earliest_root,
    hardware_root,
    is_before,
    only_ends_run,
    preceding_warning,
)
from diagnosis.scanned_log import ScannedLog
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signs.log_signs import signs_of_log
from diagnosis.signs.sign import Sign, Witness, exit_code_of
from diagnosis.signs.survival import mark_survived_elsewhere
from diagnosis.verdict import AlternativeCause, Verdict
from diagnosis.verdict_evidence import describe_place, evidence_of, is_first_by_launcher
from diagnosis.verdict_text import CLAIMED, sentence

MIN_CONFIDENCE = 0.5
_NEEDS_MORE_SOURCES = frozenset({UNKNOWN, "collective.timeout", "network.fabric", "program.illegal_access"})
_KERNEL_SOURCES = frozenset({"kernel", "machines"})
_SCHEDULER_SOURCES = frozenset({"sacct", "scontrol", "scheduler"})
_RULED_OUT_BY_MACHINES = {
    "gpu.off_bus": "the kernel log reports no GPU that fell off the bus",
    "gpu.ecc": "the kernel log reports no GPU memory error",
}
_RULED_OUT_BY_KERNEL_LOG = {
    "memory.host_oom": "the kernel log reports no process killed for memory"
}  # agents do not report these
NO_KILLS = "no kills for memory"  # in the control groups of all nodes; one of `Case.available_sources`
LAST_LINES = 4  # lines at the end of a log
_TROUBLE = re.compile(
    r"(?i)\b(?:error|failed|failure|fatal|abort(?:ed|ing)?|E_[A-Z_]{3,}|returned -\d|stopped|killed|crash\w*)\b"
)

# The likely cause of a signal that nothing explains, if something confirmed it.
_SIGNALS = {
    9: "memory.host_oom",
    7: "memory.shm",
    10: "memory.shm",
    11: "program.exception",
    6: "program.exception",
    4: "environment.package",
}
_BEST_WITNESS_FIRST: tuple[Witness, ...] = ("machine", "scheduler", "launcher")
_SHOW_RANK_BEHIND = frozenset({"stacks", "flight", "trainer"})
_KILLED = frozenset(128 + number for number in (4, 7, 8, 9, 11))


def diagnose(
    scanned: Sequence[ScannedLog],
    catalogue: Catalogue,
    *,
    records: Iterable[Sign] = (),
    available: Iterable[str] = (),
    ends: Mapping[int, float] | None = None,
) -> Verdict:
    """Return the verdict on all logs and records of one failure.

    `records` are signs that come from no log, such as a scheduler's. `available` names the kinds of sources that were
    read, as "kernel", and facts about the attempt (`diagnosis.corroboration`). `ends` maps ranks to when they failed
    (Unix seconds): lines of their logs without a time are dated by it.
    """
    signs = [sign for log in scanned for sign in signs_of_log(log, catalogue)]
    for sign in signs:
        if sign.at is None and ends and sign.rank is not None:
            sign.at = ends.get(sign.rank)
    mark_survived_elsewhere(scanned, signs)
    places = {log.name: log.expansions for log in scanned if log.expansions.first}
    for sign in signs if places else ():
        if (place := places.get(sign.file)) is not None:
            sign.line = place.line_of(sign.line)
    for sign in records:
        sign.at = sign.prefix.stamp
        signs.append(sign)
    case = Case(signs, scanned, frozenset(available))
    verdict = _from_root(case) or _without_root(case)
    return _completed(verdict, case)


# Verdicts with a root.


def _from_root(case: Case) -> Verdict | None:
    ordered = sorted(case.roots, key=chronological)
    candidates = [
        sign
        for sign in ordered
        if sign.prefix.level not in {"warning", "info", "debug", "notice"} or sign.scope == "kernel"
    ]
    is_weak = not candidates
    candidates = candidates or [sign for sign in ordered if case.has_failed_exit or not case.completed]
    if not candidates:
        return None
    trusted = uncontradicted(candidates, case)
    chosen = preceding_warning(hardware_root(trusted) or earliest_root(trusted, case), ordered)
    confidence = _confidence(chosen, trusted, case, is_weak=is_weak)
    return _verdict_of(chosen, confidence, case, candidates)


def _confidence(chosen: Sign, candidates: Sequence[Sign], case: Case, *, is_weak: bool) -> float:
    confidence = 0.96
    if chosen.traceback is not None and chosen.entry is None:
        confidence = 0.9 if chosen.traceback.is_whole else 0.8
    elif chosen.is_generic or chosen.source_kind == REPORTED_SERIES:
        confidence = 0.8
    if is_weak:
        confidence *= 0.6
    rivals = {sign.cause for sign in candidates if sign.cause != chosen.cause and not only_ends_run(sign)}
    if rivals:
        confidence *= 0.88
    return confidence * prod(doubt.factor for doubt in doubts_of(chosen, case))


def _verdict_of(chosen: Sign, confidence: float, case: Case, candidates: Sequence[Sign]) -> Verdict:
    cause = CAUSES[chosen.cause]
    traceback = chosen.traceback
    frame = (traceback.wraps or traceback).user_frame if traceback else None
    others: dict[str, AlternativeCause] = {}
    for sign in candidates:
        if sign.cause != chosen.cause and sign.cause not in others:
            others[sign.cause] = AlternativeCause(sign.cause, f"{describe_place(sign)} came later")
    return Verdict(
        chosen.cause,
        confidence,
        "",
        (chosen.entry.advice if chosen.entry else "") or cause.advice,
        evidence=evidence_of(chosen, case),
        runner_up=next(iter(others.values()), None),
        ruled_out=list(others.values()),
        rank=_rank_of(chosen, case),
        node=chosen.node,
        exception=traceback.type if traceback else "",
        frame=f"{frame.path}:{frame.function}" if frame else _frame_of(chosen, case),
        operation=chosen.operations[0] if chosen.operations else "",
        entry=chosen.entry.name if chosen.entry else "",
        heading=chosen.entry.heading if chosen.entry else "",
        source=_source_of(chosen, case),
        doubts=[doubt.text for doubt in doubts_of(chosen, case)],
    )


def _source_of(chosen: Sign, case: Case) -> Witness:
    """Return the best witness of all signs of the same cause: a kernel's line confirms what a program printed."""
    same = [chosen, *(sign for sign in (*case.roots, *case.confirmations) if sign.cause == chosen.cause)]
    found = {sign.witness for sign in same}
    return next((witness for witness in _BEST_WITNESS_FIRST if witness in found), "program")


def _frame_of(chosen: Sign, case: Case) -> str:
    """Return the frame that a hung rank was in: of the rank that is blamed, else of one that was behind."""
    signs_with_frame = [sign for sign in case.confirmations if sign.cause == chosen.cause and "frame" in sign.groups]
    behind = [sign for sign in signs_with_frame if "behind" in sign.groups]
    matching = [sign for sign in behind or signs_with_frame if sign.rank == chosen.rank] or behind
    return matching[0].groups["frame"] if matching else ""


def _rank_of(chosen: Sign, case: Case) -> int | None:
    """Return the rank at fault.

    For a timeout that is the rank that was behind or is named, not the one that noticed it.

    None for clients of a federation, as all ranks compute them.
    """
    if chosen.cause.startswith("federated."):
        return None
    if chosen.cause != "collective.timeout":
        return chosen.rank
    ranked = [sign for sign in case.confirmations if sign.cause == chosen.cause and sign.rank is not None]
    behind = {sign.rank for sign in ranked if sign.source_kind in {"flight", "collectives"} or "behind" in sign.groups}
    if len(behind) == 1:
        return behind.pop()
    named = (sign.rank for sign in case.echoes if sign.cause == chosen.cause and sign.source_kind == "trainer")
    return chosen.rank if chosen.rank is not None else next((rank for rank in named if rank is not None), None)


# Verdicts without a root.


def _without_root(case: Case) -> Verdict:
    full = next(
        (sign for sign in case.confirmations if sign.cause == "storage.full" and sign.source_kind == "snapshot"), None
    )
    if full is not None and case.has_failed_exit and not case.completed:  # what said so may not have been written
        return replace(_verdict_of(full, 0.75, case, ()), rank=None)
    if case.echoes and (not case.completed or case.has_failed_exit):
        return _from_echo(case)
    if case.has_failed_exit:
        return _from_exit(case)
    return _without_failure(case)


def _from_echo(case: Case) -> Verdict:
    """Return a verdict from consequences alone: an echo that names a cause, else unknown.

    If a rank failed or was killed before, echoes only describe its peers and do not say what happened to it.
    """
    ordered = sorted(case.echoes, key=chronological)
    explained = [sign for sign in ordered if sign.cause not in {UNKNOWN, NONE}]
    cancelled = next((sign for sign in explained if sign.cause == "scheduler.cancelled"), None)
    killed = [sign for sign in case.exits if exit_code_of(sign) in _KILLED]
    if any(cancelled is None or not is_before(cancelled, sign) for sign in killed):
        return _from_exit(case)
    if cancelled is not None and any(
        exit_code_of(sign) not in {0, 143} and is_before(sign, cancelled) for sign in case.exits
    ):
        explained = [sign for sign in explained if sign.cause != "scheduler.cancelled"]
    evidence = evidence_of(ordered[0], case)
    if explained:
        first = explained[0]
        behind = [
            sign for sign in case.confirmations if sign.cause == first.cause and sign.source_kind in _SHOW_RANK_BEHIND
        ]
        is_confirmed = first.rank is not None and any(sign.rank == first.rank for sign in behind)
        verdict = _verdict_of(first, 0.8 if is_confirmed else 0.6, case, explained)
        return verdict if behind else replace(verdict, evidence=evidence)
    if case.has_failed_exit:
        return replace(_from_exit(case), evidence=evidence)
    return Verdict(UNKNOWN, 0.7, "", CAUSES[UNKNOWN].advice, evidence=evidence)


def _from_exit(case: Case) -> Verdict:
    """Return a verdict from exits of processes alone: a signal is not a cause, but hints at one."""
    ordered = sorted(case.exits, key=chronological)
    failed = [sign for sign in ordered if exit_code_of(sign) not in {0, 143}] or ordered
    first = next((sign for sign in failed if is_first_by_launcher(sign)), failed[0])
    number = exit_code_of(first) - 128
    hint = _SIGNALS.get(number)
    if hint == "memory.host_oom" and NO_KILLS in case.available_sources:
        hint = None
    if hint and any(sign.cause == hint for sign in case.confirmations):
        return replace(_verdict_of(replace(first, cause=hint), 0.75, case, ()), entry="")
    runner_up = AlternativeCause(hint, f"{_signal_name(number)} ended it, and its sender is unknown") if hint else None
    return Verdict(
        UNKNOWN,
        0.75,
        "",
        CAUSES[UNKNOWN].advice,
        evidence=evidence_of(first, case),
        runner_up=runner_up,
        rank=first.rank,
        node=first.node,
    )


def _without_failure(case: Case) -> Verdict:
    """Return a verdict where no sign of a failure was found: the run completed, or the log just stops."""
    if case.completed:
        return Verdict(NONE, 0.95, "", CAUSES[NONE].advice, evidence=evidence_of(case.completed[-1], case))
    if (case.has_progress or case.survived) and not any(_ends_in_trouble(scanned) for scanned in case.scanned):
        return Verdict(NONE, 0.7, "", CAUSES[NONE].advice, evidence=evidence_of(None, case))
    return Verdict(UNKNOWN, 0.6, "", CAUSES[UNKNOWN].advice, evidence=evidence_of(None, case))


def _ends_in_trouble(scanned: ScannedLog) -> bool:
    """Return whether a log's last lines are errors that no entry matches, with no step after them."""
    last = max((mark.line for mark, _ in scanned.marks), default=0)
    return scanned.kind == "log" and any(
        line.number > last
        and line.prefix.level not in {"warning", "info", "debug"}
        and (line.prefix.level in {"error", "fatal"} or _TROUBLE.search(line.text))
        for line in scanned.tail[-LAST_LINES:]
    )


# Shared by both.


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _completed(verdict: Verdict, case: Case) -> Verdict:
    """Add the sentence, what was ruled out and what was not available; turn an unsure verdict into unknown."""
    if verdict.confidence < MIN_CONFIDENCE and verdict.cause not in {UNKNOWN, NONE}:
        against = "".join(f"; {doubt}" for doubt in verdict.doubts)
        first = AlternativeCause(verdict.cause, f"only {verdict.confidence:.0%} sure{against}")
        verdict = replace(
            verdict, cause=UNKNOWN, confidence=1 - verdict.confidence, runner_up=first, advice=CAUSES[UNKNOWN].advice,
            heading="",
        )  # fmt: skip
    is_claim = ATTEMPT in case.available_sources and verdict.owner == "sysadmin" and verdict.source in CLAIMED
    if is_claim and CAUSES[verdict.cause].is_hardware:
        verdict = replace(verdict, advice=unconfirmed(verdict.advice))
    limits = [f"{log.name}: {limit}" for log in case.scanned for limit in log.limits]
    return replace(
        verdict,
        summary=sentence(verdict, is_claim=is_claim),
        unavailable=[*verdict.unavailable, *limits, *_missing_sources(verdict, case)],
        ruled_out=[*verdict.ruled_out, *_ruled_out(verdict, case)],
    )


def _missing_sources(verdict: Verdict, case: Case) -> Iterator[str]:
    """Yield the sources that were not given and could say more than those that were read."""
    if verdict.cause not in _NEEDS_MORE_SOURCES:
        return
    if not case.available_sources & _KERNEL_SOURCES:
        yield "a kernel log of its nodes (dmesg, journalctl -k)"
    if not case.available_sources & _SCHEDULER_SOURCES:
        yield "the scheduler's record (sacct, scontrol show job)"


def _ruled_out(verdict: Verdict, case: Case) -> Iterator[AlternativeCause]:
    """Yield the causes that a kernel log would have shown and does not."""
    if NO_KILLS in case.available_sources and not any(sign.cause == "memory.host_oom" for sign in case.roots):
        yield AlternativeCause("memory.host_oom", "the kernel counted no process of the job killed for memory")
    if not case.available_sources & _KERNEL_SOURCES:
        return
    reported = {sign.cause for sign in case.signs}
    reasons = _RULED_OUT_BY_MACHINES | (_RULED_OUT_BY_KERNEL_LOG if "kernel" in case.available_sources else {})
    for cause, why in reasons.items():
        if (
            cause not in reported
            and cause != verdict.cause
            and not (cause == "memory.host_oom" and NO_KILLS in case.available_sources)
        ):
            yield AlternativeCause(cause, why)
