"""One cause for a failure, from all that was read: what began it, what only followed, what else was looked at.

The rules are in this order: hardware that failed shortly before the first error; then roots that nothing outlived, by
time where time is known, the specific before the generic; then what is left when there are only echoes, or only the
ends of processes. Below `SURE_ENOUGH` the answer is that nothing says why.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from diagnosis.case import Case, in_order
from diagnosis.causes import CAUSES, NONE, UNKNOWN, unconfirmed
from diagnosis.corroboration import ATTEMPT, believed, doubts_of
from diagnosis.root_cause import REPORTED, earliest, ends_only, hardware, is_before, warned_of
from diagnosis.scanned_log import Scanned
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signs.log_signs import signs_of
from diagnosis.signs.rank_exits import LAUNCHER
from diagnosis.signs.sign import Sign, Witness, code_of
from diagnosis.signs.survival import outlive
from diagnosis.verdict import Evidence, Other, Verdict
from vigil_core.masking import masked

SURE_ENOUGH = 0.5
_WANT_MORE = frozenset({UNKNOWN, "collective.timeout", "network.fabric", "program.illegal_access"})
_OF_KERNEL = frozenset({"kernel", "machines"})
_OF_SCHEDULER = frozenset({"sacct", "scontrol", "scheduler"})
_BY_KERNEL = {
    "gpu.off_bus": "the kernel tells of no GPU that fell off the bus",
    "gpu.ecc": "the kernel tells of no error in a GPU's memory",
}
_BY_ITS_LOG = {
    "memory.host_oom": "the kernel tells of no process that it killed for memory"
}  # agents tell no such thing
NO_KILLS = "no kills for memory"  # of all nodes' control groups: among what was seen
EVIDENCE = 24
SAID = 160  # letters of an exception in the sentence
LAST_WORDS = 4  # lines at the end of a log
_TROUBLE = re.compile(
    r"(?i)\b(?:error|failed|failure|fatal|abort(?:ed|ing)?|E_[A-Z_]{3,}|returned -\d|stopped|killed|crash\w*)\b"
)
TEXT = 1000

# What ends a process by a signal that nobody explains: what it would be if something confirmed it.
_SIGNALS = {
    9: "memory.host_oom",
    7: "memory.shm",
    10: "memory.shm",
    11: "program.exception",
    6: "program.exception",
    4: "environment.package",
}
# What of a root belongs into the sentence.
_SAID = {
    "federated.quorum": re.compile(r"round \d+ was lost \d+ times: [^.\n]+"),
    "federated.coverage": re.compile(r"[\d,]+ of [\d,]+ clients never counted, [^.]+"),
    "federated.clients": re.compile(r"client \d+ so: [^\n]+"),
}
_BEST_WITNESS_FIRST: tuple[Witness, ...] = ("machine", "scheduler", "launcher")
_CLAIMED = {"program": "According to its log", "launcher": "According to its launcher's report"}
"""What a verdict begins with that only the job's own log or folder supports, by its source."""
_WHO_WAS_BEHIND = frozenset({"stacks", "flight", "trainer"})
_KILLED = frozenset(128 + number for number in (4, 7, 8, 9, 11))


def diagnose(
    scanned: Sequence[Scanned],
    catalogue: Catalogue,
    *,
    records: Iterable[Sign] = (),
    seen: Iterable[str] = (),
    ends: Mapping[int, float] | None = None,
) -> Verdict:
    """The verdict on everything that was read: logs, records of schedulers. `seen`: kinds of sources, as "kernel".

    `ends`: when ranks ended by themselves; what their logs say without a time is of about then.
    """
    signs = [sign for one in scanned for sign in signs_of(one, catalogue)]
    for sign in signs:
        if sign.at is None and ends and sign.rank is not None:
            sign.at = ends.get(sign.rank)
    outlive(scanned, signs)
    places = {one.name: one.expansions for one in scanned if one.expansions.first}
    for sign in signs if places else ():
        if (place := places.get(sign.file)) is not None:
            sign.line = place.line_of(sign.line)
    for sign in records:
        sign.at = sign.prefix.stamp
        signs.append(sign)
    case = Case(signs, scanned, frozenset(seen))
    verdict = _by_root(case) or _without_root(case)
    return _told(verdict, case)


# With a root.


def _by_root(case: Case) -> Verdict | None:
    ordered = sorted(case.roots, key=in_order)
    candidates = [
        sign
        for sign in ordered
        if sign.prefix.level not in {"warning", "info", "debug", "notice"} or sign.scope == "kernel"
    ]
    is_weak = not candidates
    candidates = candidates or [sign for sign in ordered if case.has_failed_exit or not case.completed]
    if not candidates:
        return None
    trusted = believed(candidates, case)
    chosen = warned_of(hardware(trusted) or earliest(trusted, case), ordered)
    confidence = _confidence(chosen, trusted, case, is_weak=is_weak)
    return _verdict_of(chosen, confidence, case, candidates)


def _confidence(chosen: Sign, candidates: Sequence[Sign], case: Case, *, is_weak: bool) -> float:
    sure = 0.96
    if chosen.traceback is not None and chosen.entry is None:
        sure = 0.9 if chosen.traceback.is_whole else 0.8
    elif chosen.is_generic or chosen.of == REPORTED:
        sure = 0.8
    if is_weak:
        sure *= 0.6
    rivals = {sign.cause for sign in candidates if sign.cause != chosen.cause and not ends_only(sign)}
    if rivals:
        sure *= 0.88
    return sure * prod(doubt.factor for doubt in doubts_of(chosen, case))


def _verdict_of(chosen: Sign, confidence: float, case: Case, candidates: Sequence[Sign]) -> Verdict:
    cause = CAUSES[chosen.cause]
    traceback = chosen.traceback
    own = (traceback.wraps or traceback).own if traceback else None
    others: dict[str, Other] = {}
    for sign in candidates:
        if sign.cause != chosen.cause and sign.cause not in others:
            others[sign.cause] = Other(sign.cause, f"{_place(sign)} came after it")
    return Verdict(
        chosen.cause,
        confidence,
        "",
        (chosen.entry.advice if chosen.entry else "") or cause.advice,
        evidence=_evidence(chosen, case),
        runner_up=next(iter(others.values()), None),
        ruled_out=list(others.values()),
        rank=_rank_of(chosen, case),
        node=chosen.node,
        exception=traceback.type if traceback else "",
        frame=f"{own.path}:{own.function}" if own else _frame_of(chosen, case),
        doing=chosen.doing[0] if chosen.doing else "",
        entry=chosen.entry.name if chosen.entry else "",
        heading=chosen.entry.heading if chosen.entry else "",
        source=_source_of(chosen, case),
        doubts=[doubt.text for doubt in doubts_of(chosen, case)],
    )


def _source_of(chosen: Sign, case: Case) -> Witness:
    """Return the best witness of all that says the same: a kernel's line confirms what a program printed."""
    same = [chosen, *(sign for sign in (*case.roots, *case.confirmations) if sign.cause == chosen.cause)]
    found = {sign.witness for sign in same}
    return next((witness for witness in _BEST_WITNESS_FIRST if witness in found), "program")


def _frame_of(chosen: Sign, case: Case) -> str:
    """Where a hung rank was, by its stack: that of the rank that is blamed, else of who was behind."""
    told = [sign for sign in case.confirmations if sign.cause == chosen.cause and "frame" in sign.groups]
    behind = [sign for sign in told if "behind" in sign.groups]
    own = [sign for sign in behind or told if sign.rank == chosen.rank] or behind
    return own[0].groups["frame"] if own else ""


def _rank_of(chosen: Sign, case: Case) -> int | None:
    """Whose fault it is: of a time-out not of who noticed it, but of the one rank that was behind, or that is named; of
    clients that failed no rank's, as they are computed on all."""
    if chosen.cause.startswith("federated."):
        return None
    if chosen.cause != "collective.timeout":
        return chosen.rank
    told = [sign for sign in case.confirmations if sign.cause == chosen.cause and sign.rank is not None]
    behind = {sign.rank for sign in told if sign.of in {"flight", "collectives"} or "behind" in sign.groups}
    if len(behind) == 1:
        return behind.pop()
    named = (sign.rank for sign in case.echoes if sign.cause == chosen.cause and sign.of == "trainer")
    return chosen.rank if chosen.rank is not None else next((rank for rank in named if rank is not None), None)


# Without one.


def _without_root(case: Case) -> Verdict:
    full = next((sign for sign in case.confirmations if sign.cause == "storage.full" and sign.of == "look"), None)
    if full is not None and case.has_failed_exit and not case.completed:  # what said so may not have been written
        return replace(_verdict_of(full, 0.75, case, ()), rank=None)
    if case.echoes and (not case.completed or case.has_failed_exit):
        return _by_echo(case)
    if case.has_failed_exit:
        return _by_exit(case)
    return _nothing(case)


def _by_echo(case: Case) -> Verdict:
    """Only what follows from something else: the transport's own word counts, else nobody knows.

    Where a rank failed or was killed first, that word is of its peers: what happened to it is not told.
    """
    ordered = sorted(case.echoes, key=in_order)
    telling = [sign for sign in ordered if sign.cause not in {UNKNOWN, NONE}]
    cancelled = next((sign for sign in telling if sign.cause == "scheduler.cancelled"), None)
    killed = [sign for sign in case.exits if code_of(sign) in _KILLED]
    if any(cancelled is None or not is_before(cancelled, sign) for sign in killed):
        return _by_exit(case)
    if cancelled is not None and any(
        code_of(sign) not in {0, 143} and is_before(sign, cancelled) for sign in case.exits
    ):
        telling = [sign for sign in telling if sign.cause != "scheduler.cancelled"]
    evidence = _evidence(ordered[0], case)
    if telling:
        first = telling[0]
        behind = [sign for sign in case.confirmations if sign.cause == first.cause and sign.of in _WHO_WAS_BEHIND]
        is_confirmed = first.rank is not None and any(sign.rank == first.rank for sign in behind)
        verdict = _verdict_of(first, 0.8 if is_confirmed else 0.6, case, telling)
        return verdict if behind else replace(verdict, evidence=evidence)
    if case.has_failed_exit:
        return replace(_by_exit(case), evidence=evidence)
    return Verdict(UNKNOWN, 0.7, "", CAUSES[UNKNOWN].advice, evidence=evidence)


def _by_exit(case: Case) -> Verdict:
    """Only that processes ended: a signal is no cause, but hints at one."""
    ordered = sorted(case.exits, key=in_order)
    failed = [sign for sign in ordered if code_of(sign) not in {0, 143}] or ordered
    first = next((sign for sign in failed if _is_first_by_launcher(sign)), failed[0])
    number = code_of(first) - 128
    hint = _SIGNALS.get(number)
    if hint == "memory.host_oom" and NO_KILLS in case.seen:
        hint = None
    if hint and any(sign.cause == hint for sign in case.confirmations):
        return replace(_verdict_of(replace(first, cause=hint), 0.75, case, ()), entry="")
    runner_up = Other(hint, f"{_name_of(number)} ended it, and nothing says who sent that") if hint else None
    return Verdict(
        UNKNOWN,
        0.75,
        "",
        CAUSES[UNKNOWN].advice,
        evidence=_evidence(first, case),
        runner_up=runner_up,
        rank=first.rank,
        node=first.node,
    )


def _nothing(case: Case) -> Verdict:
    """No sign of a failure at all: it ended well, or the log just stops."""
    if case.completed:
        return Verdict(NONE, 0.95, "", CAUSES[NONE].advice, evidence=_evidence(case.completed[-1], case))
    if (case.has_progress or case.survived) and not any(_ends_in_trouble(scanned) for scanned in case.scanned):
        return Verdict(NONE, 0.7, "", CAUSES[NONE].advice, evidence=_evidence(None, case))
    return Verdict(UNKNOWN, 0.6, "", CAUSES[UNKNOWN].advice, evidence=_evidence(None, case))


def _ends_in_trouble(scanned: Scanned) -> bool:
    """Whether a log's last words are of an error that no entry knows, with no step after it."""
    last = max((mark.line for mark, _ in scanned.marks), default=0)
    return scanned.kind == "log" and any(
        line.number > last
        and line.prefix.level not in {"warning", "info", "debug"}
        and (line.prefix.level in {"error", "fatal"} or _TROUBLE.search(line.text))
        for line in scanned.tail[-LAST_WORDS:]
    )


def _is_first_by_launcher(sign: Sign) -> bool:
    """Whether it is the launcher's record of the rank that ended first, with its time and memory."""
    return sign.file == LAUNCHER and "first" in sign.groups


# What both need.


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _place(sign: Sign) -> str:
    return f"line {sign.line:,} of {sign.file}" if sign.line else f"the word of the {sign.file}"


def _evidence(root: Sign | None, case: Case) -> list[Evidence]:
    """The root, then what confirms it, then echoes and what was survived; each line once, none without bound."""
    found: list[Evidence] = []
    groups = [("root", [root] if root else [])]
    if root is not None:
        same = [sign for sign in case.roots if sign is not root and sign.cause == root.cause]
        groups.append(("confirmation", same + [sign for sign in case.confirmations if sign.cause == root.cause]))
    exits = sorted(case.exits, key=lambda sign: not _is_first_by_launcher(sign))
    groups.append(("confirmation", exits[:4]))
    others = [sign for sign in case.roots if root is None or sign.cause != root.cause]
    groups += [("echo", case.echoes + others), ("survived", case.survived)]
    if root is None or root.cause == UNKNOWN:  # what would have confirmed something is all that there is
        groups.append(("context", [sign for sign in case.confirmations if sign.of]))
    groups.append(("context", case.context))
    seen: set[tuple[str, int, str]] = set()
    for role, signs in groups:
        for sign in sorted(signs, key=in_order)[: EVIDENCE // 3]:
            place = (sign.file, sign.line, "" if sign.line else sign.text)  # records have no lines
            if place in seen or len(found) >= EVIDENCE:
                continue
            seen.add(place)
            found.append(
                Evidence(
                    sign.file,
                    sign.line,
                    masked(sign.text.strip())[:TEXT],
                    role,
                    sign.cause,
                    sign.rank,
                    sign.node,
                    sign.at,
                    sign.count,
                    sign.entry.name if sign.entry else "",
                )  # fmt: skip
            )
    return found


def _told(verdict: Verdict, case: Case) -> Verdict:
    """With its sentence, what was ruled out, and what could not be looked at; unsure ones become unknown."""
    if verdict.confidence < SURE_ENOUGH and verdict.cause not in {UNKNOWN, NONE}:
        against = "".join(f"; {doubt}" for doubt in verdict.doubts)
        first = Other(verdict.cause, f"{verdict.confidence:.0%} sure is not enough to say so{against}")
        verdict = replace(
            verdict, cause=UNKNOWN, confidence=1 - verdict.confidence, runner_up=first, advice=CAUSES[UNKNOWN].advice,
            heading="",
        )  # fmt: skip
    is_claim = ATTEMPT in case.seen and verdict.owner == "sysadmin" and verdict.source in _CLAIMED
    if is_claim and CAUSES[verdict.cause].is_hardware:
        verdict = replace(verdict, advice=unconfirmed(verdict.advice))
    limits = [f"{one.name}: {limit}" for one in case.scanned for limit in one.limits]
    return replace(
        verdict,
        says=_sentence(verdict, is_claim=is_claim),
        not_seen=[*verdict.not_seen, *limits, *_missing(verdict, case)],
        ruled_out=[*verdict.ruled_out, *_ruled_out(verdict, case)],
    )


def _missing(verdict: Verdict, case: Case) -> Iterator[str]:
    """What nobody gave, where it could tell more than what was read."""
    if verdict.cause not in _WANT_MORE:
        return
    if not case.seen & _OF_KERNEL:
        yield "a kernel log of its nodes (dmesg, journalctl -k)"
    if not case.seen & _OF_SCHEDULER:
        yield "the scheduler's record (sacct, scontrol show job)"


def _ruled_out(verdict: Verdict, case: Case) -> Iterator[Other]:
    """What a kernel log that was read says nothing of."""
    if NO_KILLS in case.seen and not any(sign.cause == "memory.host_oom" for sign in case.roots):
        yield Other("memory.host_oom", "the kernel counted no process of the job's that it killed for memory")
    if not case.seen & _OF_KERNEL:
        return
    told = {sign.cause for sign in case.signs}
    known = _BY_KERNEL | (_BY_ITS_LOG if "kernel" in case.seen else {})
    for cause, why in known.items():
        if cause not in told and cause != verdict.cause and not (cause == "memory.host_oom" and NO_KILLS in case.seen):
            yield Other(cause, why)


def _sentence(verdict: Verdict, *, is_claim: bool) -> str:
    """Return what happened in one sentence that stands alone. `is_claim`: only the job's own log or folder says so."""
    cause = CAUSES[verdict.cause]
    where = f"rank {verdict.rank}" if verdict.rank is not None else ""
    where += f" on {verdict.node}" if verdict.node and where else f"on {verdict.node}" if verdict.node else ""
    title = verdict.heading or cause.heading
    if is_claim:
        title = f"{_CLAIMED[verdict.source]}, {verdict.heading or cause.title}"
    if verdict.cause == "program.exception" and verdict.exception:
        root = next((one.text for one in verdict.evidence if one.role == "root"), verdict.exception)
        title += f": {root.splitlines()[0][:SAID]}"
    if verdict.cause in _SAID:
        root = next((one.text for one in verdict.evidence if one.role == "root"), "")
        if said := _SAID[verdict.cause].search(root):
            title += f": {said[0].replace(' so:', ':', 1)[:SAID].strip()}"
    return f"{title} ({where})." if where else f"{title.removesuffix('.')}."
