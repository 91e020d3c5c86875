"""What a run has outlived is no cause: steps came after it, the end that was meant, or other words of its own."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from diagnosis.causes import UNKNOWN
from diagnosis.logs.progress import Mark
from diagnosis.scanned_log import Scanned
from diagnosis.signs.sign import Sign, code_of

STEPS_AFTER = 2  # from which on a run is known to have gone on
ORDINARY = 6  # lines by which a program shows that it went on
STARTED_ANEW = 25  # lines after which a log that had ended goes on with the next attempt
STEPS_ELSEWHERE = 10  # of another log, whose clock may be another
GOES_ON_S = 30.0  # after which a step in another log is not of before
HANDLED_WITHIN = 12  # lines, for somebody to say that what was said was survived


def survive(scanned: Scanned, signs: list[Sign]) -> None:
    """Mark what the run has outlived: two more steps came after it, the end that was meant to come, or so it says."""
    marks = [mark for mark, _ in scanned.marks]
    failed = max((sign.line for sign in signs if sign.role == "exit" and code_of(sign)), default=0)
    completed = [sign for sign in signs if sign.role == "completed" and sign.line > failed]
    for sign in signs:
        if sign.role == "completed" and sign.line <= failed:
            sign.survived = "a process failed after it"
    handled = [sign for sign in signs if sign.role == "handled"]
    for sign in signs:
        if sign.role not in {"root", "echo", "exit"} or sign.of == "course":
            continue
        steps = _steps_after(marks, sign.line)
        if steps >= STEPS_AFTER:
            sign.survived = "the run went on after it"
        elif any(one.line > sign.line for one in completed) and (steps or not _is_raised(sign)):
            sign.survived = "the run came to its end after it"
        elif any(
            0 < one.line - sign.line <= HANDLED_WITHIN and one.prefix.stream == sign.prefix.stream for one in handled
        ):
            sign.survived = "the program dealt with it"
        elif sign.traceback is not None and _is_logged_only(scanned, sign):
            sign.survived = "it was only logged, and the program went on"
    _meet_late(marks, signs)
    _outlive(scanned, [sign for sign in signs if sign.role == "root" and not sign.survived])


def _meet_late(marks: Sequence[Mark], signs: Sequence[Sign]) -> None:
    """Ranks that had met and trained, and can't meet once more since one is gone, only tell of that one."""
    are_told = [sign.line for sign in signs if sign.role == "echo" and sign.cause == UNKNOWN]
    for sign in signs:
        is_late = len({mark.step for mark in marks if mark.line < sign.line}) >= STEPS_AFTER
        if sign.role == "root" and sign.cause == "rendezvous.failed" and is_late and are_told[-1:] > [sign.line]:
            sign.role, sign.cause = "echo", UNKNOWN


def outlive(scanned: Sequence[Scanned], signs: Sequence[Sign]) -> None:
    """Of several logs: what ranks saw of others, or how they ended, where another log goes on after it."""
    if len(scanned) < 2:
        return
    troubled = {sign.file for sign in signs if sign.role in {"root", "echo", "exit"} and not sign.survived}
    steps = [
        (one.name, sorted((prefix.stamp, mark.step) for mark, prefix in one.marks if prefix.stamp is not None))
        for one in scanned
        if one.name not in troubled
    ]
    for sign in signs:
        if sign.role not in {"echo", "exit"} or sign.survived or sign.at is None:
            continue
        for name, marks in steps:
            after = marks[bisect.bisect_right(marks, (sign.at + GOES_ON_S, float("inf"))) :]
            if name != sign.file and len({step for _, step in after}) >= STEPS_ELSEWHERE:
                sign.survived = "the run went on after it"
                break


def _is_logged_only(scanned: Scanned, sign: Sign) -> bool:
    """Whether a logger printed the traceback as a warning, and its stream said more after it."""
    assert sign.traceback is not None
    frames = sign.traceback.frames
    if frames and frames[0].function == "<module>":  # nobody caught it
        return False
    level = scanned.before.get(sign.traceback.chain[0].first) or scanned.before.get(sign.traceback.first)
    return level == "warning" and _ordinary_after(scanned, sign, None) >= ORDINARY


def _outlive(scanned: Scanned, roots: list[Sign]) -> None:
    """Of two in one stream, the program went on for a while after the earlier: then it was not what ended it."""
    for sign in roots:
        if sign.scope == "kernel":
            continue
        if sign.scope == "slurm" and any(_is_of_next_attempt(scanned, other, sign) for other in roots):
            sign.survived = "it was started anew after it"
            continue
        for other in roots:
            is_later = other.line > sign.line and other.prefix.stream == sign.prefix.stream and other.scope != "slurm"
            if is_later and _knows_as_much(other, sign) and _ordinary_after(scanned, sign, other.line) >= ORDINARY:
                sign.survived = "the program went on after it, until something else ended it"
                break


def _is_of_next_attempt(scanned: Scanned, other: Sign, sign: Sign) -> bool:
    """Whether so much was written between a scheduler's end and another root that it is the next attempt's."""
    if other.line <= sign.line or other.scope == "slurm":
        return False
    between = sum(
        bisect.bisect_left(lines, other.line) - bisect.bisect_right(lines, sign.line)
        for lines in scanned.ordinary.values()
    )
    return between >= STARTED_ANEW


def _knows_as_much(other: Sign, sign: Sign) -> bool:
    """Whether the later one is no vaguer than the earlier: a program's end mostly names less than what began it."""
    return _vagueness(other) <= _vagueness(sign)


def _vagueness(sign: Sign) -> int:
    return 2 if sign.entry is None else int(sign.is_generic)


def _ordinary_after(scanned: Scanned, sign: Sign, until: int | None) -> int:
    """Lines of the same stream after it, up to another, that say nothing of failures."""
    lines = scanned.ordinary.get(sign.prefix.stream, [])
    first = bisect.bisect_right(lines, sign.line)
    return (bisect.bisect_left(lines, until) if until is not None else len(lines)) - first


def _is_raised(sign: Sign) -> bool:
    return sign.traceback is not None and sign.traceback.is_whole


def _steps_after(marks: Sequence[Mark], line: int) -> int:
    index = bisect.bisect_right([mark.line for mark in marks], line)
    return len({mark.step for mark in marks[index:]})
