"""From what a log says to what may be a cause: each sign with its place, its time, whose it is."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from diagnosis.causes import UNKNOWN
from diagnosis.logs import progress
from diagnosis.logs.prefixes import Prefix
from diagnosis.logs.tracebacks import Traceback
from diagnosis.scanned_log import Hit, Scanned
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signatures.entry import Entry
from diagnosis.signatures.operations import operations_of
from diagnosis.signs import collectives
from diagnosis.signs.sign import PRINTED, Sign
from diagnosis.signs.survival import survive

# Said about what may be, not what is: what stands behind these words on a line is no evidence.
_ADVICE = re.compile(
    rb"\b(?:might be|may be|could be|can be|possibly|probably|perhaps|consider|try |e\.g\.|such as|for example|hint|"
    rb"tip|if you|in case|to avoid|to prevent|instead of|see also|suggest\w*|recommend\w*|make sure|please check|"
    rb"usually)\b",
    re.IGNORECASE,
)
# Types that code raises and catches every day: of a chain, what came after them says more.
_DAILY = frozenset(
    """KeyError AttributeError StopIteration IndexError ImportError ModuleNotFoundError TypeError ValueError Empty
    LookupError FileNotFoundError UnicodeDecodeError NotImplementedError AssertionError EntryNotFoundError
    LocalEntryNotFoundError TimeoutError OSError HTTPError ConnectionError ConnectionRefusedError gaierror
    NameResolutionError NewConnectionError MaxRetryError JSONDecodeError error EOFError""".split()  # noqa: SIM905
)


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
    passing_on = set()
    for traceback, prefix in scanned.tracebacks:
        if not traceback.is_stack and traceback.type:
            found.append(of_traceback(scanned.name, traceback, prefix, catalogue))
            passing_on |= {one.line for one in traceback.chain if one.wraps is not None} - {found[-1].line}
    found = _one_a_place([sign for sign in found if sign.line not in passing_on])
    found += collectives.signs_of(scanned)
    if (sign := _of_course(scanned)) is not None:
        found.append(sign)
    for summary in scanned.summaries:
        found.append(Sign(scanned.name, summary.line, summary.text, UNKNOWN, "exit", Prefix(), groups=summary.groups))
    for sign in found:
        sign.at = sign.prefix.stamp if sign.prefix.stamp is not None else clock.at(sign.line)
    survive(scanned, found)
    return sorted(found, key=lambda sign: sign.line)


def _of_hit(scanned: Scanned, hit: Hit, count: int) -> Sign:
    entry = hit.entry
    of = ""
    if scanned.is_of_job:
        of = PRINTED if entry.scope == "kernel" else ""
    elif scanned.kind in {"kernel", "nvidia-smi"} and entry.role in {"root", "confirmation"}:
        of = "kernel"
    return Sign(
        scanned.name, hit.line, hit.text[hit.prefix.length :], entry.cause, entry.role, hit.prefix, entry, count=count,
        groups=hit.groups, of=of, is_of_folder=scanned.is_of_folder,
    )  # fmt: skip


def _of_course(scanned: Scanned) -> Sign | None:
    """What the loss itself says, where it went wrong by the end."""
    went = progress.course([mark for mark, _ in scanned.marks])
    if went is None:
        return None
    cause = "numerics.nan" if went.kind == "nan" else "numerics.divergence"
    prefix = next((prefix for mark, prefix in scanned.marks if mark.line == went.line), Prefix())
    prefix = replace(prefix, level="")  # that a line tells a loss as news is no word on what the loss is
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
    said = link.text if link.wraps is None else f"{link.text} {link.wraps.text}"
    return Sign(name, line, said[:1000], cause, role, prefix, entry, link, doing)


def _root_of(
    judged: list[tuple[Traceback, Entry | None, str, str, tuple[str, ...]]],
) -> tuple[Traceback, Entry | None, str, str, tuple[str, ...]]:
    """Of a chain the first that says something of its own; of a wrapper what it wraps, if that has a name."""
    if judged[0][3] == "echo" and judged[-1][0].wraps is None:  # raised while a peer's loss was dealt with
        return judged[0]
    specific = [one for one in judged if one[1] is not None and not one[1].is_generic and one[3] == "root"]
    for one in specific:
        is_last = one is judged[-1]
        if (
            is_last
            or one[0].name not in _DAILY
            or one[0] is judged[-1][0].wraps
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
    _, _, best = max(candidates, key=lambda one: (*one[:2], one[2].is_site))
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
    matches = catalogue.compiled(entry.exception).fullmatch  # RE2's, as all that sites may write
    if not matches(kind.encode()) and not matches(link.type.encode()):
        return False
    if entry.during and not any(name in doing for name in entry.during):
        return False
    if entry.pattern and not catalogue.compiled(entry.pattern).search(link.message.encode()):
        return False
    if entry.unless and catalogue.compiled(entry.unless).search(link.text.encode()):
        return False
    if not entry.frame:
        return True
    search = catalogue.compiled(entry.frame).search
    return any(search(f"{frame.path}:{frame.function}".encode()) for frame in link.frames)


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


def _tells(sign: Sign) -> tuple[int, bool, bool, int]:
    """Of two that are equally specific the site's: who wrote it knows what the line means there."""
    if sign.traceback is not None:
        return (10 if sign.entry is None or not sign.entry.is_generic else 2, False, True, 0)
    assert sign.entry is not None
    return (_weight(sign.entry), sign.entry.is_site, sign.entry.role == "root", len(sign.entry.pattern))
