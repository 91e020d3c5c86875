"""From what a log says to what may be a cause: each sign has its place, its time, whose it is, and whether it was survived."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jobs.postmortem.causes import UNKNOWN
from jobs.postmortem.operations import operations_of
from jobs.postmortem.prefixes import Prefix
from jobs.postmortem.progress import Mark
from jobs.postmortem.scan import Hit, Scanned
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
HANDLED_WITHIN = 12  # lines, for somebody to say that what was said was survived


@dataclass(slots=True)
class Sign:
    """Something that may be the cause, or came of it."""

    file: str
    line: int
    text: str
    cause: str
    role: str
    prefix: Prefix
    entry: Entry | None = None
    traceback: Traceback | None = None
    doing: tuple[str, ...] = ()
    count: int = 1
    at: float | None = None
    survived: str = ""  # why it is no cause after all
    groups: dict[str, str] = field(default_factory=dict)
    of: str = ""  # slurm or flight: of a record, not of a line in a log

    @property
    def rank(self) -> int | None:
        if self.prefix.rank is not None:
            return self.prefix.rank
        told = self.groups.get("rank", "")
        return int(told) if told.isdigit() and len(told) < 8 else self.prefix.local_rank

    @property
    def node(self) -> str:
        return self.groups.get("node", "") or self.prefix.node

    @property
    def is_generic(self) -> bool:
        return self.entry is not None and self.entry.is_generic

    @property
    def scope(self) -> str:
        return self.entry.scope if self.entry is not None else self.of or "program"


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
    for summary in scanned.summaries:
        found.append(Sign(scanned.name, summary.line, summary.text, UNKNOWN, "exit", Prefix(), groups=summary.groups))
    for sign in found:
        sign.at = sign.prefix.stamp if sign.prefix.stamp is not None else clock.at(sign.line)
    _survive(scanned, found)
    return sorted(found, key=lambda sign: sign.line)


def _of_hit(scanned: Scanned, hit: Hit, count: int) -> Sign:
    entry = hit.entry
    return Sign(
        scanned.name, hit.line, hit.text[hit.prefix.length :], entry.cause, entry.role, hit.prefix, entry, None, (), count,
        groups=hit.groups,
    )  # fmt: skip


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
        found += [sign for sign in several if sign not in meant]
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
    """Mark what the run has outlived: two more steps came after it, or the end that was meant to come."""
    marks = [mark for mark, _ in scanned.marks]
    completed = [sign for sign in signs if sign.role == "completed"]
    handled = [sign for sign in signs if sign.role == "handled"]
    for sign in signs:
        if sign.role not in {"root", "echo"}:
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


def _is_raised(sign: Sign) -> bool:
    return sign.traceback is not None and sign.traceback.is_whole


def _steps_after(marks: Sequence[Mark], line: int) -> int:
    index = bisect.bisect_right([mark.line for mark in marks], line)
    return len({mark.step for mark in marks[index:]})
