"""Mark what a run has survived, which is not a cause: steps, a planned end or ordinary output came after it."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from diagnosis.causes import UNKNOWN
from diagnosis.logs.progress import StepMark
from diagnosis.scanned_log import ScannedLog
from diagnosis.signs.sign import Sign, exit_code_of

STEPS_AFTER = 2  # after this many, a run has continued
MIN_ORDINARY_LINES = 6  # of a stream, after which a program has gone on
RESTART_LINES = 25  # lines after a scheduler's end that belong to the next attempt
STEPS_ELSEWHERE = 10  # in another log, whose clock may differ
CONTINUES_AFTER_S = 30.0  # later than this, a step in another log came after the sign
HANDLED_WITHIN = 12  # lines, in which the program may report that it handled a failure


def mark_survived(scanned: ScannedLog, signs: list[Sign]) -> None:
    """Mark the signs of one log that the run survived: two more steps, its planned end, or its own word for it."""
    marks = [mark for mark, _ in scanned.marks]
    failed = max((sign.line for sign in signs if sign.role == "exit" and exit_code_of(sign)), default=0)
    completed = [sign for sign in signs if sign.role == "completed" and sign.line > failed]
    for sign in signs:
        if sign.role == "completed" and sign.line <= failed:
            sign.survived = "a process failed after it"
    handled = [sign for sign in signs if sign.role == "handled"]
    for sign in signs:
        if sign.role not in {"root", "echo", "exit"} or sign.source_kind == "course":
            continue
        steps = _steps_after(marks, sign.line)
        if steps >= STEPS_AFTER:
            sign.survived = "the run continued after it"
        elif any(other.line > sign.line for other in completed) and (steps or not _is_raised(sign)):
            sign.survived = "the run completed after it"
        elif any(
            0 < other.line - sign.line <= HANDLED_WITHIN and other.prefix.stream == sign.prefix.stream
            for other in handled
        ):
            sign.survived = "the program handled it"
        elif sign.traceback is not None and _is_logged_only(scanned, sign):
            sign.survived = "it was only logged, and the program continued"
    _demote_late_rendezvous(marks, signs)
    _mark_outlived_roots(scanned, [sign for sign in signs if sign.role == "root" and not sign.survived])


def _demote_late_rendezvous(marks: Sequence[StepMark], signs: Sequence[Sign]) -> None:
    """Turn a failed rendezvous of ranks that had already trained into an echo: they only miss one that is gone."""
    echo_lines = [sign.line for sign in signs if sign.role == "echo" and sign.cause == UNKNOWN]
    for sign in signs:
        is_late = len({mark.step for mark in marks if mark.line < sign.line}) >= STEPS_AFTER
        if sign.role == "root" and sign.cause == "rendezvous.failed" and is_late and echo_lines[-1:] > [sign.line]:
            sign.role, sign.cause = "echo", UNKNOWN


def mark_survived_elsewhere(scanned: Sequence[ScannedLog], signs: Sequence[Sign]) -> None:
    """Mark echoes and exits in one log where another log goes on training after them."""
    if len(scanned) < 2:
        return
    troubled = {sign.file for sign in signs if sign.role in {"root", "echo", "exit"} and not sign.survived}
    steps = [
        (log.name, sorted((prefix.stamp, mark.step) for mark, prefix in log.marks if prefix.stamp is not None))
        for log in scanned
        if log.name not in troubled
    ]
    for sign in signs:
        if sign.role not in {"echo", "exit"} or sign.survived or sign.at is None:
            continue
        for name, marks in steps:
            after = marks[bisect.bisect_right(marks, (sign.at + CONTINUES_AFTER_S, float("inf"))) :]
            if name != sign.file and len({step for _, step in after}) >= STEPS_ELSEWHERE:
                sign.survived = "the run continued after it"
                break


def _is_logged_only(scanned: ScannedLog, sign: Sign) -> bool:
    """Return whether a logger printed the traceback as a warning, and its stream went on."""
    assert sign.traceback is not None
    frames = sign.traceback.frames
    if frames and frames[0].function == "<module>":  # it was not caught
        return False
    level = scanned.level_before.get(sign.traceback.chain[0].first) or scanned.level_before.get(sign.traceback.first)
    return level == "warning" and _ordinary_after(scanned, sign, None) >= MIN_ORDINARY_LINES


def _mark_outlived_roots(scanned: ScannedLog, roots: list[Sign]) -> None:
    """Mark the earlier of two roots in one stream where the program went on for a while between them."""
    for sign in roots:
        if sign.scope == "kernel":
            continue
        if sign.scope == "slurm" and any(_is_of_next_attempt(scanned, other, sign) for other in roots):
            sign.survived = "the job was restarted after it"
            continue
        for other in roots:
            is_later = other.line > sign.line and other.prefix.stream == sign.prefix.stream and other.scope != "slurm"
            if (
                is_later
                and _is_as_specific(other, sign)
                and _ordinary_after(scanned, sign, other.line) >= MIN_ORDINARY_LINES
            ):
                sign.survived = "the program continued after it, until something else ended it"
                break


def _is_of_next_attempt(scanned: ScannedLog, other: Sign, sign: Sign) -> bool:
    """Return whether so much was printed between a scheduler's end and another root that it is the next attempt's."""
    if other.line <= sign.line or other.scope == "slurm":
        return False
    between = sum(
        bisect.bisect_left(lines, other.line) - bisect.bisect_right(lines, sign.line)
        for lines in scanned.ordinary_lines.values()
    )
    return between >= RESTART_LINES


def _is_as_specific(other: Sign, sign: Sign) -> bool:
    """Return whether the later sign is as specific as the earlier: a program's end mostly names less than its cause."""
    return _vagueness(other) <= _vagueness(sign)


def _vagueness(sign: Sign) -> int:
    return 2 if sign.entry is None else int(sign.is_generic)


def _ordinary_after(scanned: ScannedLog, sign: Sign, until: int | None) -> int:
    """Count the lines of the same stream after a sign, up to another line, that report no failure."""
    lines = scanned.ordinary_lines.get(sign.prefix.stream, [])
    first = bisect.bisect_right(lines, sign.line)
    return (bisect.bisect_left(lines, until) if until is not None else len(lines)) - first


def _is_raised(sign: Sign) -> bool:
    return sign.traceback is not None and sign.traceback.is_whole


def _steps_after(marks: Sequence[StepMark], line: int) -> int:
    index = bisect.bisect_right([mark.line for mark in marks], line)
    return len({mark.step for mark in marks[index:]})
