"""From what a log says to what may be a cause: each sign has its place, its time, whose it is, and whether it was survived."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence

from jobs.postmortem import collectives, progress
from jobs.postmortem.causes import UNKNOWN
from jobs.postmortem.operations import operations_of
from jobs.postmortem.prefixes import Prefix
from jobs.postmortem.progress import Mark
from jobs.postmortem.scan import Hit, Scanned
from jobs.postmortem.sign import Sign, code_of
from jobs.postmortem.signatures import Catalogue, Entry
from jobs.postmortem.tracebacks import Traceback

# Said about what may be, not what is: what stands behind these words on a line is no evidence.
_ADVICE = re.compile(
    rb"\b(?:might be|may be|could be|can be|possibly|probably|perhaps|consider|try |e\.g\.|such as|for example|hint|tip|"
    rb"if you|in case|to avoid|to prevent|instead of|see also|suggest\w*|recommend\w*|make sure|please check|usually)\b",
    re.IGNORECASE,
)
# Types that code raises and catches every day: of a chain, what came after them says more.
_DAILY = frozenset(
    {"KeyError", "AttributeError", "StopIteration", "IndexError", "ImportError", "ModuleNotFoundError", "TypeError", "ValueError",
     "Empty", "LookupError", "FileNotFoundError", "UnicodeDecodeError", "NotImplementedError", "AssertionError", "EntryNotFoundError",
     "LocalEntryNotFoundError", "TimeoutError", "OSError", "HTTPError", "ConnectionError", "ConnectionRefusedError", "gaierror",
     "NameResolutionError", "NewConnectionError", "MaxRetryError", "JSONDecodeError", "error", "EOFError"}
)  # fmt: skip
STEPS_AFTER = 2  # from which on a run is known to have gone on
ORDINARY = 6  # lines by which a program shows that it went on
STARTED_ANEW = 25  # lines after which a log that had ended goes on with the next attempt
GOES_ON_S = 30.0  # after which a step in another log is not of before
HANDLED_WITHIN = 12  # lines, for somebody to say that what was said was survived


class Clock:
    """When a line was written, by the stamps around it."""

    def __init__(self, stamps: Sequence[tuple[int, float]]) -> None:
        self._lines = [line for line, _ in stamps]
        self._stamps = [stamp for _, stamp in stamps]

    def at(self, line: int) -> float | None:
        index = bisect.bisect_right(self._lines, line) - 1
        if index >= 0:
            return self._stamps[index]
        return self._stamps[0] if self._stamps else None


def signs_of(scanned: Scanned, catalogue: Catalogue) -> list[Sign]:
    """The signs of one log, in the order of its lines."""
    clock = Clock(scanned.stamps)
    found = [_of_hit(scanned, hit, told.count) for told in scanned.told.values() for hit in told.hits]
    found = [sign for sign in found if sign.line not in scanned.within and not _is_advice(sign, catalogue)]
    for traceback, prefix in scanned.tracebacks:
        if not traceback.is_stack and traceback.type:
            found.append(of_traceback(scanned.name, traceback, prefix, catalogue))
    found = _one_a_place(found)
    found += collectives.signs_of(scanned)
    if (sign := _of_course(scanned)) is not None:
        found.append(sign)
    for summary in scanned.summaries:
        found.append(Sign(scanned.name, summary.line, summary.text, UNKNOWN, "exit", Prefix(), groups=summary.groups))
    for sign in found:
        sign.at = sign.prefix.stamp if sign.prefix.stamp is not None else clock.at(sign.line)
    _survive(scanned, found)
    return sorted(found, key=lambda sign: sign.line)


def _of_hit(scanned: Scanned, hit: Hit, count: int) -> Sign:
    entry = hit.entry
    of = "kernel" if scanned.kind in {"kernel", "nvidia-smi"} and entry.role in {"root", "confirmation"} else ""
    return Sign(
        scanned.name, hit.line, hit.text[hit.prefix.length :], entry.cause, entry.role, hit.prefix, entry, None, (), count,
        groups=hit.groups, of=of,
    )  # fmt: skip


def _of_course(scanned: Scanned) -> Sign | None:
    """What the loss itself says, where it went wrong by the end."""
    went = progress.course([mark for mark, _ in scanned.marks])
    if went is None:
        return None
    cause = "numerics.nan" if went.kind == "nan" else "numerics.divergence"
    prefix = next((prefix for mark, prefix in scanned.marks if mark.line == went.line), Prefix())
    return Sign(scanned.name, went.line, went.text, cause, "root", prefix, of="course")


def _is_advice(sign: Sign, catalogue: Catalogue) -> bool:
    """Whether the line only says what might be."""
    if sign.entry is None or sign.role not in {"root", "confirmation"}:
        return False
    text = sign.text.encode()
    if (advice := _ADVICE.search(text)) is None:
        return False
    found = catalogue.compiled(sign.entry.pattern).search(text)
    return found is not None and advice.start() < int(found.start())


# Tracebacks.


def of_traceback(name: str, traceback: Traceback, prefix: Prefix, catalogue: Catalogue) -> Sign:
    """The sign that a traceback is: of its chain the link that says where it began."""
    chain = traceback.chain
    judged = [(link, *classify(link, catalogue, outer=chain[index + 1 :])) for index, link in enumerate(chain)]
    root = _root_of(judged)
    link, entry, cause, role, doing = root
    line = link.line or link.first
    return Sign(name, line, link.text[:1000], cause, role, prefix, entry, link, doing)


def _root_of(
    judged: list[tuple[Traceback, Entry | None, str, str, tuple[str, ...]]],
) -> tuple[Traceback, Entry | None, str, str, tuple[str, ...]]:
    """Of a chain the first that says something of its own."""
    specific = [one for one in judged if one[1] is not None and not one[1].is_generic and one[3] == "root"]
    for one in specific:
        is_last = one is judged[-1]
        if (
            is_last
            or one[0].name not in _DAILY
            or all(other[1] is None or other[1].is_generic for other in judged if other is not one)
        ):
            return one
    if specific:
        return specific[-1]
    roots = [one for one in judged if one[3] == "root"]
    own = [one for one in roots if one[0].name not in _DAILY] or roots or judged
    last = judged[-1]
    if last in own or last[0].wraps is None:
        # Raised while another was handled: the handler's own is the program's word, unless it only passes on.
        return own[0] if own[0][0].name not in _DAILY else last if last[3] == "root" else own[0]
    return own[0]


def classify(
    link: Traceback, catalogue: Catalogue, outer: Iterable[Traceback] = ()
) -> tuple[Entry | None, str, str, tuple[str, ...]]:
    """What one exception means: by its words, then its class and what was being done; else it is the program's own."""
    doing = operations_of(link.frames)
    for one in outer:
        doing += tuple(name for name in operations_of(one.frames) if name not in doing)
    candidates: list[tuple[int, int, Entry]] = []
    for index, line in enumerate(_lines(link)):
        for entry in catalogue.on(line.encode()):
            if entry.role in {"root", "echo"} and not (index and entry.is_generic):
                candidates.append((_weight(entry) - (index > 0), -index, entry))
    for entry in catalogue.of_tracebacks:
        if fits(entry, link, doing, catalogue):
            candidates.append((_weight(entry), 0, entry))
    if not candidates:
        return None, "program.exception", "root", doing
    _, _, best = max(candidates, key=lambda one: one[:2])
    return best, best.cause, best.role, doing


def _lines(link: Traceback) -> list[str]:
    lines = link.message.split("\n")
    return [f"{link.type}: {lines[0]}" if lines[0] else link.type, *lines[1:20]]


def _weight(entry: Entry) -> int:
    if entry.is_generic:
        return 1 if entry.pattern else 0
    if not entry.exception:
        return 6
    return 2 + 3 * bool(entry.pattern) + 2 * bool(entry.during) + 2 * bool(entry.frame)


def fits(entry: Entry, link: Traceback, doing: tuple[str, ...], catalogue: Catalogue) -> bool:
    kind = link.type if "." in entry.exception.replace(r"\.", "") and "\\." in entry.exception else link.name
    if re.fullmatch(entry.exception, kind) is None and re.fullmatch(entry.exception, link.type) is None:
        return False
    if entry.during and not any(name in doing for name in entry.during):
        return False
    if entry.pattern and not catalogue.compiled(entry.pattern).search(link.message.encode()):
        return False
    if entry.unless and catalogue.compiled(entry.unless).search(link.text.encode()):
        return False
    return not entry.frame or any(re.search(entry.frame, f"{frame.path}:{frame.function}") for frame in link.frames)


def _one_a_place(signs: list[Sign]) -> list[Sign]:
    """One sign for a line: of several that say what it means, the most telling."""
    by_line: dict[int, list[Sign]] = {}
    for sign in signs:
        by_line.setdefault(sign.line, []).append(sign)
    found = []
    for several in by_line.values():
        meant = [sign for sign in several if sign.role in {"root", "echo"}]
        exits = [sign for sign in several if sign.role == "exit"]
        found += [sign for sign in several if sign not in meant and sign not in exits]
        if exits:
            found.append(max(exits, key=lambda sign: len(sign.groups)))
        if meant:
            found.append(max(meant, key=_tells))
    return found


def _tells(sign: Sign) -> tuple[int, int, int]:
    if sign.traceback is not None:
        return (10 if sign.entry is None or not sign.entry.is_generic else 2, 1, 0)
    assert sign.entry is not None
    return (_weight(sign.entry), sign.entry.role == "root", len(sign.entry.pattern))


# Whether it went on.


def _survive(scanned: Scanned, signs: list[Sign]) -> None:
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
        if sign.role == "root" and sign.cause == "rendezvous.failed" and any(line > sign.line for line in are_told):
            if len({mark.step for mark in marks if mark.line < sign.line}) >= STEPS_AFTER:
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
            if name != sign.file and len({step for _, step in after}) >= STEPS_AFTER:
                sign.survived = "the run went on after it"
                break


def _is_logged_only(scanned: Scanned, sign: Sign) -> bool:
    """Whether a logger printed the traceback as a warning, and its stream said more after it."""
    assert sign.traceback is not None
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
    """Whether so much was written between the end that a scheduler tells and another root that it is the next attempt's."""
    if other.line <= sign.line or other.scope == "slurm":
        return False
    between = sum(
        bisect.bisect_left(lines, other.line) - bisect.bisect_right(lines, sign.line) for lines in scanned.ordinary.values()
    )
    return between >= STARTED_ANEW


def _knows_as_much(other: Sign, sign: Sign) -> bool:
    """Whether the later one is no vaguer than the earlier: the end that a program comes to names less than what began it."""
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
