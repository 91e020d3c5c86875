"""One cause for a failure, from all that was read: what began it, what only followed, what else was looked at.

The rules are in this order: hardware that failed shortly before the first error; then roots that nothing outlived, by
time where time is known, the specific before the generic; then what is left when there are only echoes, or only the
ends of processes. Below `SURE_ENOUGH` the answer is that nothing says why.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from jobs.postmortem.causes import CAUSES, NONE, UNKNOWN
from jobs.postmortem.masking import masked
from jobs.postmortem.scan import Scanned
from jobs.postmortem.sign import Sign, code_of
from jobs.postmortem.signatures import Catalogue
from jobs.postmortem.signs import outlive, signs_of
from jobs.postmortem.verdict import Evidence, Other, Verdict

HARDWARE_BEFORE_S = 600.0  # the first error that a program prints of a GPU that failed
CLOCKS_S = 2.0  # stamps in two logs closer than this order nothing
CLOCKS_APART_S = 120.0  # and up to here only what is of one kind, as clocks of machines go apart
SURE_ENOUGH = 0.5
EVIDENCE = 24
LAST_WORDS = 4  # lines at the end of a log
_TROUBLE = re.compile(
    r"(?i)\b(?:error|failed|failure|fatal|abort(?:ed|ing)?|E_[A-Z_]{3,}|returned -\d|stopped|killed|crash\w*)\b"
)
TEXT = 1000

_FINAL = ("scheduler.time_limit", "scheduler.preempted", "scheduler.node_fail", "scheduler.cancelled")
# What ends a process by a signal that nobody explains: what it would be if something confirmed it.
_SIGNALS = {
    9: "memory.host_oom",
    7: "memory.shm",
    10: "memory.shm",
    11: "program.exception",
    6: "program.exception",
    4: "environment.package",
}


# What ranks see of others that failed, or never came.
_CONSEQUENCES = frozenset({"network.fabric", "collective.timeout", "rendezvous.failed"})
_OF_DEVICES = re.compile(r"(?i)\b(?:cuda|gpus?|bf16|devices?|nccl|accelerator)\b")
_STOP = re.compile(r"(?i)\bSIGTERM\b|\bsignal 15\b|\bpreempt\w*")
_KILLED = frozenset(128 + number for number in (4, 7, 8, 9, 11))


@dataclass(slots=True)
class _Case:
    """All signs of all logs, sorted out."""

    signs: list[Sign]
    scanned: Sequence[Scanned]
    seen: frozenset[str] = frozenset()
    roots: list[Sign] = field(default_factory=list)
    echoes: list[Sign] = field(default_factory=list)
    survived: list[Sign] = field(default_factory=list)
    confirmations: list[Sign] = field(default_factory=list)
    exits: list[Sign] = field(default_factory=list)
    completed: list[Sign] = field(default_factory=list)

    def __post_init__(self) -> None:
        for sign in self.signs:
            if sign.role in {"root", "echo"} and sign.survived:
                self.survived.append(sign)
            elif sign.role == "root":
                self.roots.append(sign)
            elif sign.role == "echo":
                self.echoes.append(sign)
            elif sign.role == "confirmation":
                self.confirmations.append(sign)
            elif sign.role == "exit" and not sign.survived:
                self.exits.append(sign)
            elif sign.role == "completed" and not sign.survived:
                self.completed.append(sign)

    @property
    def has_failed_exit(self) -> bool:
        return any(code_of(sign) != 0 for sign in self.exits)

    @property
    def has_progress(self) -> bool:
        return any(scanned.marks for scanned in self.scanned)


def diagnose(
    scanned: Sequence[Scanned], catalogue: Catalogue, *, records: Iterable[Sign] = (), seen: Iterable[str] = ()
) -> Verdict:
    """The verdict on everything that was read: logs, records of schedulers. `seen`: kinds of sources, as "kernel"."""
    signs = [sign for one in scanned for sign in signs_of(one, catalogue)]
    outlive(scanned, signs)
    for sign in records:
        sign.at = sign.prefix.stamp
        signs.append(sign)
    case = _Case(signs, scanned, frozenset(seen))
    verdict = _by_root(case) or _without_root(case)
    return _told(verdict, case)


# With a root.


def _by_root(case: _Case) -> Verdict | None:
    ordered = sorted(case.roots, key=_order)
    candidates = [
        sign
        for sign in ordered
        if sign.prefix.level not in {"warning", "info", "debug", "notice"} or sign.scope == "kernel"
    ]
    is_weak = not candidates
    candidates = candidates or [sign for sign in ordered if case.has_failed_exit or not case.completed]
    if not candidates:
        return None
    chosen = _warned_of(_hardware(candidates) or _earliest(candidates, case), ordered)
    confidence = _confidence(chosen, candidates, case, is_weak=is_weak)
    return _verdict_of(chosen, confidence, case, candidates)


def _order(sign: Sign) -> tuple[float, str, int]:
    return (sign.at if sign.at is not None else 0.0, sign.file, sign.line)


def _hardware(candidates: Sequence[Sign]) -> Sign | None:
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


def _earliest(candidates: Sequence[Sign], case: _Case) -> Sign:
    """Where it began: the first by line in one log, by time over several; what only ends a run comes after a real cause."""
    real = [sign for sign in candidates if not _ends_only(sign)] or list(candidates)
    specific = [sign for sign in real if not sign.is_generic] or real
    if any(_is_telling(sign) for sign in specific):  # then the loss only shows what came of it
        specific = [sign for sign in specific if sign.of != "course"]
    blamed = _blamed(case)
    named = [sign for sign in specific if sign.rank in blamed] if blamed else []
    first = _first(named or specific)
    if first.traceback is not None and first.entry is None:  # it says less than whatever has a name beside it
        beside = [sign for sign in real if sign.prefix.stream == first.prefix.stream and sign.file == first.file]
        told = [sign for sign in beside if _is_telling(sign)] or [sign for sign in beside if sign.entry is not None]
        first = _first([sign for sign in told if sign.cause not in _CONSEQUENCES] or [first])
    if first.cause in _CONSEQUENCES:
        first = _first([sign for sign in specific if _brings_about(sign, first)] or [first])
    if not _ends_only(first):
        ended = [sign for sign in candidates if _ends_only(sign)]
        if any(_is_before(sign, first) for sign in ended) or (ended and _was_told_to_stop(first, case)):
            first = _first([sign for sign in ended if _is_before(sign, first)] or ended)
    return _named_by_hardware(first, candidates)


def _first(signs: Sequence[Sign]) -> Sign:
    first = signs[0]
    for sign in signs[1:]:
        if _is_before(sign, first):
            first = sign
    return first


def _brings_about(sign: Sign, first: Sign) -> bool:
    """Whether it may have brought about what the other ranks see of it: it names its own cause, and no clock says later."""
    is_same = sign.rank == first.rank if sign.rank is not None else sign.prefix.stream == first.prefix.stream
    if sign.cause in _CONSEQUENCES or not _is_telling(sign) or is_same:
        return False
    is_later = sign.prefix.stamp is not None and first.prefix.stamp is not None and sign.file == first.file
    return not is_later or (sign.prefix.stamp or 0.0) - (first.prefix.stamp or 0.0) <= CLOCKS_S


def _was_told_to_stop(first: Sign, case: _Case) -> bool:
    """Whether the processes had been sent SIGTERM before: what goes wrong as they save and leave is no cause."""
    told = [sign for sign in case.echoes if sign.file == first.file and _STOP.search(sign.text)]
    return any(sign.line < first.line for sign in told)


def _warned_of(first: Sign, roots: Sequence[Sign]) -> Sign:
    """What a driver was warned of before, where the program then only finds that it has no GPU."""
    if first.cause.startswith("program.") and _OF_DEVICES.search(first.text):
        for sign in roots:
            if sign.prefix.level == "warning" and sign.cause.startswith(("gpu.", "environment.driver")) and _is_before(sign, first):
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
        return next((sign for sign in candidates if sign.of == "course" and sign.cause == "numerics.divergence"), first)
    return first


def _is_telling(sign: Sign) -> bool:
    return sign.entry is not None and not sign.is_generic


def _blamed(case: _Case) -> frozenset[int]:
    """Who failed first by the word of whoever started the ranks: torchrun's summary, else the first end that srun tells."""
    told = [sign for sign in case.exits if sign.groups.get("first") and sign.rank is not None]
    if not told:
        bad = [
            sign for sign in sorted(case.exits, key=_order) if code_of(sign) not in {0, 143} and sign.rank is not None
        ]
        told = bad[:1]
    return frozenset(sign.rank for sign in told if sign.rank is not None)


def _ends_only(sign: Sign) -> bool:
    return sign.cause in _FINAL


def _is_before(one: Sign, other: Sign) -> bool:
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
    if _ends_only(sign):
        return 0
    if sign.scope == "kernel":
        return 4
    domain = sign.cause.partition(".")[0]
    if domain in {"gpu", "memory", "storage"}:
        return 3
    if sign.entry is not None and not sign.is_generic:
        return 2
    return 1


def _confidence(chosen: Sign, candidates: Sequence[Sign], case: _Case, *, is_weak: bool) -> float:
    sure = 0.96
    if chosen.traceback is not None and chosen.entry is None:
        sure = 0.9 if chosen.traceback.is_whole else 0.8
    elif chosen.is_generic:
        sure = 0.8
    if is_weak:
        sure *= 0.6
    rivals = {sign.cause for sign in candidates if sign.cause != chosen.cause and not _ends_only(sign)}
    if rivals:
        sure *= 0.88
    return sure


def _verdict_of(chosen: Sign, confidence: float, case: _Case, candidates: Sequence[Sign]) -> Verdict:
    cause = CAUSES[chosen.cause]
    traceback = chosen.traceback
    own = traceback.own if traceback else None
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
        rank=chosen.rank,
        node=chosen.node,
        exception=traceback.type if traceback else "",
        frame=f"{own.path}:{own.function}" if own else "",
        doing=chosen.doing[0] if chosen.doing else "",
        entry=chosen.entry.name if chosen.entry else "",
    )


# Without one.


def _without_root(case: _Case) -> Verdict:
    if case.echoes and (not case.completed or case.has_failed_exit):
        return _by_echo(case)
    if case.has_failed_exit:
        return _by_exit(case)
    return _nothing(case)


def _by_echo(case: _Case) -> Verdict:
    """Only what follows from something else: the transport's own word counts, else nobody knows.

    Where a rank failed or was killed first, that word is of its peers: what happened to it is not told.
    """
    ordered = sorted(case.echoes, key=_order)
    telling = [sign for sign in ordered if sign.cause not in {UNKNOWN, NONE}]
    cancelled = next((sign for sign in telling if sign.cause == "scheduler.cancelled"), None)
    killed = [sign for sign in case.exits if code_of(sign) in _KILLED]
    if any(cancelled is None or not _is_before(cancelled, sign) for sign in killed):
        return _by_exit(case)
    if cancelled is not None and any(
        code_of(sign) not in {0, 143} and _is_before(sign, cancelled) for sign in case.exits
    ):
        telling = [sign for sign in telling if sign.cause != "scheduler.cancelled"]
    evidence = _evidence(ordered[0], case)
    if telling:
        first = telling[0]
        return replace(_verdict_of(first, 0.6, case, telling), evidence=evidence)
    if case.has_failed_exit:
        return replace(_by_exit(case), evidence=evidence)
    return Verdict(UNKNOWN, 0.7, "", CAUSES[UNKNOWN].advice, evidence=evidence)


def _by_exit(case: _Case) -> Verdict:
    """Only that processes ended: a signal is no cause, but hints at one."""
    ordered = sorted(case.exits, key=_order)
    first = next((sign for sign in ordered if code_of(sign) not in {0, 143}), ordered[0])
    number = code_of(first) - 128
    hint = _SIGNALS.get(number)
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


def _nothing(case: _Case) -> Verdict:
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


# What both need.


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _place(sign: Sign) -> str:
    return f"line {sign.line:,} of {sign.file}"


def _evidence(root: Sign | None, case: _Case) -> list[Evidence]:
    """The root, then what confirms it, then echoes and what was survived; each line once, none without bound."""
    found: list[Evidence] = []
    groups = [("root", [root] if root else [])]
    if root is not None:
        same = [sign for sign in case.roots if sign is not root and sign.cause == root.cause]
        groups.append(("confirmation", same + [sign for sign in case.confirmations if sign.cause == root.cause]))
    groups.append(("confirmation", case.exits[:4]))
    others = [sign for sign in case.roots if root is None or sign.cause != root.cause]
    groups += [("echo", case.echoes + others), ("survived", case.survived)]
    seen: set[tuple[str, int]] = set()
    for role, signs in groups:
        for sign in sorted(signs, key=_order)[: EVIDENCE // 3]:
            if (sign.file, sign.line) in seen or len(found) >= EVIDENCE:
                continue
            seen.add((sign.file, sign.line))
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


def _told(verdict: Verdict, case: _Case) -> Verdict:
    """With its sentence, what was ruled out, and what could not be looked at; unsure ones become unknown."""
    if verdict.confidence < SURE_ENOUGH and verdict.cause not in {UNKNOWN, NONE}:
        first = Other(verdict.cause, f"{verdict.confidence:.0%} sure is not enough to say so")
        verdict = replace(
            verdict, cause=UNKNOWN, confidence=1 - verdict.confidence, runner_up=first, advice=CAUSES[UNKNOWN].advice
        )
    limits = [f"{one.name}: {limit}" for one in case.scanned for limit in one.limits]
    return replace(verdict, says=_sentence(verdict), not_seen=[*verdict.not_seen, *limits])


def _sentence(verdict: Verdict) -> str:
    """What happened, for somebody who reads nothing else."""
    cause = CAUSES[verdict.cause]
    where = f"rank {verdict.rank}" if verdict.rank is not None else ""
    where += f" on {verdict.node}" if verdict.node and where else f"on {verdict.node}" if verdict.node else ""
    title = cause.title[:1].upper() + cause.title[1:]
    return f"{title} ({where})." if where else f"{title}."
