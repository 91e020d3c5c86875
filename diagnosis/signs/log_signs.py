"""Turn the scan of a log into signs, each with its place, its time and its rank."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from diagnosis.causes import UNKNOWN
from diagnosis.logs import progress
from diagnosis.logs.prefixes import Prefix
from diagnosis.logs.tracebacks import Traceback
from diagnosis.scanned_log import Hit, ScannedLog
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signatures.entry import Entry
from diagnosis.signatures.operations import operations_of
from diagnosis.signs import collectives
from diagnosis.signs.sign import PRINTED, Sign
from diagnosis.signs.survival import mark_survived

# Words of advice or conjecture: what follows them on a line is not evidence.
_HEDGING_WORDS = re.compile(
    rb"\b(?:might be|may be|could be|can be|possibly|probably|perhaps|consider|try |e\.g\.|such as|for example|hint|"
    rb"tip|if you|in case|to avoid|to prevent|instead of|see also|suggest\w*|recommend\w*|make sure|please check|"
    rb"usually)\b",
    re.IGNORECASE,
)
# Exceptions that code raises and catches all the time: later links of a chain are more informative.
_COMMON_EXCEPTIONS = frozenset(
    """KeyError AttributeError StopIteration IndexError ImportError ModuleNotFoundError TypeError ValueError Empty
    LookupError FileNotFoundError UnicodeDecodeError NotImplementedError AssertionError EntryNotFoundError
    LocalEntryNotFoundError TimeoutError OSError HTTPError ConnectionError ConnectionRefusedError gaierror
    NameResolutionError NewConnectionError MaxRetryError JSONDecodeError error EOFError""".split()  # noqa: SIM905
)


class LineClock:
    """Date a line by the stamps around it."""

    def __init__(self, stamps: Sequence[tuple[int, float]]) -> None:
        self._lines = [line for line, _ in stamps]
        self._stamps = [stamp for _, stamp in stamps]

    def at(self, line: int) -> float | None:
        """Return when the line was written in Unix seconds, by the last stamp before it, or the first of all.

        None without any.
        """
        index = bisect.bisect_right(self._lines, line) - 1
        if index >= 0:
            return self._stamps[index]
        return self._stamps[0] if self._stamps else None


def signs_of_log(scanned: ScannedLog, catalogue: Catalogue) -> list[Sign]:
    """Return the signs of one log in the order of its lines; those that the run survived are marked."""
    clock = LineClock(scanned.stamps)
    found = [
        _sign_of_hit(scanned, hit, entry_hits.count)
        for entry_hits in scanned.entry_hits.values()
        for hit in entry_hits.hits
    ]
    found = [sign for sign in found if sign.line not in scanned.traceback_lines and not _is_advice(sign, catalogue)]
    relayed_lines = set()
    for traceback, prefix in scanned.tracebacks:
        if not traceback.is_stack and traceback.type:
            found.append(sign_of_traceback(scanned.name, traceback, prefix, catalogue))
            relayed_lines |= {link.line for link in traceback.chain if link.wraps is not None} - {found[-1].line}
    found = _most_specific_per_line([sign for sign in found if sign.line not in relayed_lines])
    found += collectives.signs_of_collectives(scanned)
    if (sign := _sign_of_loss(scanned)) is not None:
        found.append(sign)
    for summary in scanned.summaries:
        found.append(Sign(scanned.name, summary.line, summary.text, UNKNOWN, "exit", Prefix(), groups=summary.groups))
    for sign in found:
        sign.at = sign.prefix.stamp if sign.prefix.stamp is not None else clock.at(sign.line)
    mark_survived(scanned, found)
    return sorted(found, key=lambda sign: sign.line)


def _sign_of_hit(scanned: ScannedLog, hit: Hit, count: int) -> Sign:
    entry = hit.entry
    of = ""
    if scanned.is_from_job:
        of = PRINTED if entry.scope == "kernel" else ""
    elif scanned.kind in {"kernel", "nvidia-smi"} and entry.role in {"root", "confirmation"}:
        of = "kernel"
    return Sign(
        scanned.name, hit.line, hit.text[hit.prefix.length :], entry.cause, entry.role, hit.prefix, entry, count=count,
        groups=hit.groups, source_kind=of, is_from_job_folder=scanned.is_from_job_folder,
    )  # fmt: skip


def _sign_of_loss(scanned: ScannedLog) -> Sign | None:
    """Return a sign of the loss itself where it went wrong by the end."""
    outcome = progress.loss_outcome([mark for mark, _ in scanned.marks])
    if outcome is None:
        return None
    cause = "numerics.nan" if outcome.kind == "nan" else "numerics.divergence"
    prefix = next((prefix for mark, prefix in scanned.marks if mark.line == outcome.line), Prefix())
    prefix = replace(prefix, level="")  # the level with which a logger reports a loss says nothing about the loss
    return Sign(scanned.name, outcome.line, outcome.text, cause, "root", prefix, source_kind="course")


def _is_advice(sign: Sign, catalogue: Catalogue) -> bool:
    """Return whether the line only says what might be: the match follows words such as "may be" or "try"."""
    if sign.entry is None or sign.role not in {"root", "confirmation"}:
        return False
    text = sign.text.encode()
    if (advice := _HEDGING_WORDS.search(text)) is None:
        return False
    found = catalogue.compiled(sign.entry.pattern).search(text)
    return found is not None and advice.start() < int(found.start())


# Tracebacks.


def sign_of_traceback(name: str, traceback: Traceback, prefix: Prefix, catalogue: Catalogue) -> Sign:
    """Return the sign of a traceback: of its chain, the link that shows where the failure began."""
    chain = traceback.chain
    judged = [
        (link, *classify_exception(link, catalogue, outer=chain[index + 1 :])) for index, link in enumerate(chain)
    ]
    root = _root_of_chain(judged)
    link, entry, cause, role, doing = root
    line = link.line or link.first
    text = link.text if link.wraps is None else f"{link.text} {link.wraps.text}"
    return Sign(name, line, text[:1000], cause, role, prefix, entry, link, doing)


def _root_of_chain(
    judged: list[tuple[Traceback, Entry | None, str, str, tuple[str, ...]]],
) -> tuple[Traceback, Entry | None, str, str, tuple[str, ...]]:
    """Return the first link of a chain that has a cause of its own; for a wrapper, the wrapped one, if it is named."""
    if judged[0][3] == "echo" and judged[-1][0].wraps is None:  # raised while a peer's loss was dealt with
        return judged[0]
    specific = [
        candidate
        for candidate in judged
        if candidate[1] is not None and not candidate[1].is_generic and candidate[3] == "root"
    ]
    for candidate in specific:
        is_last = candidate is judged[-1]
        if (
            is_last
            or candidate[0].name not in _COMMON_EXCEPTIONS
            or candidate[0] is judged[-1][0].wraps
            or all(other[1] is None or other[1].is_generic for other in judged if other is not candidate)
        ):
            return candidate
    if specific:
        return specific[-1]
    roots = [candidate for candidate in judged if candidate[3] == "root"]
    specific_roots = (
        [candidate for candidate in roots if candidate[0].name not in _COMMON_EXCEPTIONS] or roots or judged
    )
    last = judged[-1]
    if last in specific_roots or last[0].wraps is None:
        # Raised while another was handled: the handler's own is the program's word, unless it only passes on.
        return (
            specific_roots[0]
            if specific_roots[0][0].name not in _COMMON_EXCEPTIONS
            else last
            if last[3] == "root"
            else specific_roots[0]
        )
    return specific_roots[0]


def classify_exception(
    link: Traceback, catalogue: Catalogue, outer: Iterable[Traceback] = ()
) -> tuple[Entry | None, str, str, tuple[str, ...]]:
    """Return (entry, cause, role, operations) of one exception: by its message, then by its class and operations.

    Without a matching entry the cause is program.exception. `outer`: the later links of the chain.
    """
    doing = operations_of(link.frames)
    for frame_link in outer:
        doing += tuple(name for name in operations_of(frame_link.frames) if name not in doing)
    candidates: list[tuple[int, int, Entry]] = []
    for index, line in enumerate(_lines(link)):
        for entry in catalogue.entries_matching(line.encode()):
            if entry.role in {"root", "echo"} and not (index and entry.is_generic):
                candidates.append((_specificity(entry) - (index > 0), -index, entry))
    for entry in catalogue.traceback_entries_for(link.name, link.type):
        if _matches_details(entry, link, doing, catalogue):
            candidates.append((_specificity(entry), 0, entry))
    if not candidates:
        return None, "program.exception", "root", doing
    _, _, best = max(candidates, key=lambda item: (*item[:2], item[2].is_site))
    return best, best.cause, best.role, doing


def _lines(link: Traceback) -> list[str]:
    lines = link.message.split("\n")
    return [f"{link.type}: {lines[0]}" if lines[0] else link.type, *lines[1:20]]


def _specificity(entry: Entry) -> int:
    if entry.is_generic:
        return 1 if entry.pattern else 0
    if not entry.exception:
        return 6
    return 2 + 3 * bool(entry.pattern) + 2 * bool(entry.during) + 2 * bool(entry.frame)


def matches_traceback(entry: Entry, link: Traceback, doing: tuple[str, ...], catalogue: Catalogue) -> bool:
    """Return whether an entry for tracebacks matches one exception."""
    is_of_class = catalogue.matches_class(entry, link.name, link.type)
    return is_of_class and _matches_details(entry, link, doing, catalogue)


def _matches_details(entry: Entry, link: Traceback, doing: tuple[str, ...], catalogue: Catalogue) -> bool:
    """Return whether an entry for this exception's class matches its message, operations and frames."""
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


def _most_specific_per_line(signs: list[Sign]) -> list[Sign]:
    """Keep one sign per line: the most specific of several that give it a meaning."""
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
            found.append(max(meant, key=_priority))
    return found


def _priority(sign: Sign) -> tuple[int, bool, bool, int]:
    """Rank signs of one line.

    Of two equally specific ones the site's wins: its author knows what the line means there.
    """
    if sign.traceback is not None:
        return (10 if sign.entry is None or not sign.entry.is_generic else 2, False, True, 0)
    assert sign.entry is not None
    return (_specificity(sign.entry), sign.entry.is_site, sign.entry.role == "root", len(sign.entry.pattern))
