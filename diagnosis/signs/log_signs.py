"""Turn the scan of a log into signs, each with its place, its time and its rank."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    signs = [
        _sign_of_hit(scanned, hit, entry_hits.count)
        for entry_hits in scanned.entry_hits.values()
        for hit in entry_hits.hits
    ]
    signs = [sign for sign in signs if sign.line not in scanned.traceback_lines and not _is_advice(sign, catalogue)]
    relayed_lines = set()
    for traceback, prefix in scanned.tracebacks:
        if not traceback.is_stack and traceback.type:
            signs.append(sign_of_traceback(scanned.name, traceback, prefix, catalogue))
            relayed_lines |= {link.line for link in traceback.chain if link.wraps is not None} - {signs[-1].line}
    signs = _most_specific_per_line([sign for sign in signs if sign.line not in relayed_lines])
    signs += collectives.signs_of_collectives(scanned)
    if (sign := _sign_of_loss(scanned)) is not None:
        signs.append(sign)
    for summary in scanned.summaries:
        signs.append(
            Sign(
                scanned.name,
                summary.line,
                summary.text,
                cause=UNKNOWN,
                role="exit",
                prefix=Prefix(),
                groups=summary.groups,
            )
        )
    for sign in signs:
        sign.at = sign.prefix.stamp if sign.prefix.stamp is not None else clock.at(sign.line)
    mark_survived(scanned, signs)
    return sorted(signs, key=lambda sign: sign.line)


def _sign_of_hit(scanned: ScannedLog, hit: Hit, count: int) -> Sign:
    entry = hit.entry
    of = ""
    if scanned.is_from_job:
        of = PRINTED if entry.scope == "kernel" else ""
    elif scanned.kind in {"kernel", "nvidia-smi"} and entry.role in {"root", "confirmation"}:
        of = "kernel"
    return Sign(
        scanned.name,
        hit.line,
        hit.text[hit.prefix.length :],
        cause=entry.cause,
        role=entry.role,
        prefix=hit.prefix,
        entry=entry,
        count=count,
        groups=hit.groups,
        source_kind=of,
        is_from_job_folder=scanned.is_from_job_folder,
    )


def _sign_of_loss(scanned: ScannedLog) -> Sign | None:
    """Return a sign of the loss itself where it went wrong by the end."""
    outcome = progress.loss_outcome([mark for mark, _ in scanned.marks])
    if outcome is None:
        return None
    cause = "numerics.nan" if outcome.kind == "nan" else "numerics.divergence"
    prefix = next((prefix for mark, prefix in scanned.marks if mark.line == outcome.line), Prefix())
    prefix = replace(prefix, level="")  # the level with which a logger reports a loss says nothing about the loss
    return Sign(scanned.name, outcome.line, outcome.text, cause=cause, role="root", prefix=prefix, source_kind="course")


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


@dataclass(frozen=True, slots=True)
class ClassifiedException:
    """One exception of a chain, with the entry that matches it best and what follows from that entry."""

    traceback: Traceback
    entry: Entry | None
    cause: str
    role: str
    operations: tuple[str, ...]

    @property
    def has_own_entry(self) -> bool:
        """Return whether an entry matches that is made for such failures, and not for any of its class."""
        return self.entry is not None and not self.entry.is_generic

    @property
    def is_common(self) -> bool:
        return self.traceback.name in _COMMON_EXCEPTIONS


def sign_of_traceback(name: str, traceback: Traceback, prefix: Prefix, catalogue: Catalogue) -> Sign:
    """Return the sign of a traceback: of its chain, the link that shows where the failure began."""
    chain = traceback.chain
    links = [classify_exception(link, catalogue, outer=chain[index + 1 :]) for index, link in enumerate(chain)]
    root = _root_of_chain(links)
    link = root.traceback
    text = link.text if link.wraps is None else f"{link.text} {link.wraps.text}"
    return Sign(
        file=name,
        line=link.line or link.first,
        text=text[:1000],
        cause=root.cause,
        role=root.role,
        prefix=prefix,
        entry=root.entry,
        traceback=link,
        operations=root.operations,
    )


def _root_of_chain(links: Sequence[ClassifiedException]) -> ClassifiedException:
    """Return the first link of a chain that has a cause of its own; for a wrapper, the wrapped one, if it is named."""
    first, last = links[0], links[-1]
    if first.role == "echo" and last.traceback.wraps is None:  # raised while a peer's loss was dealt with
        return first
    specific = [link for link in links if link.has_own_entry and link.role == "root"]
    for link in specific:
        is_only = not any(other.has_own_entry for other in links if other is not link)
        if is_only or link is last or not link.is_common or link.traceback is last.traceback.wraps:
            return link
    if specific:
        return specific[-1]
    return _root_without_entry(links)


def _root_without_entry(links: Sequence[ClassifiedException]) -> ClassifiedException:
    """Return the root of a chain in which no entry of its own matches a root: its first uncommon exception."""
    last = links[-1]
    roots = [link for link in links if link.role == "root"]
    if uncommon := [link for link in roots if not link.is_common]:
        return uncommon[0]
    # Raised while another exception was handled: the handler's own exception explains the failure, unless it only
    # follows from another process's.
    return last if last.role == "root" else (roots or links)[0]


def classify_exception(link: Traceback, catalogue: Catalogue, outer: Iterable[Traceback] = ()) -> ClassifiedException:
    """Classify one exception: by its message, then by its class and operations.

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
        return ClassifiedException(link, None, "program.exception", "root", doing)
    _, _, best = max(candidates, key=lambda item: (*item[:2], item[2].is_site))
    return ClassifiedException(link, best, best.cause, best.role, doing)


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
    chosen = []
    for several in by_line.values():
        meant = [sign for sign in several if sign.role in {"root", "echo"}]
        exits = [sign for sign in several if sign.role == "exit"]
        chosen += [sign for sign in several if sign not in meant and sign not in exits]
        if exits:
            chosen.append(max(exits, key=lambda sign: len(sign.groups)))
        if meant:
            chosen.append(max(meant, key=_priority))
    return chosen


def _priority(sign: Sign) -> tuple[int, bool, bool, int]:
    """Rank signs of one line.

    Of two equally specific ones the site's wins: its author knows what the line means there.
    """
    if sign.traceback is not None:
        return (10 if sign.entry is None or not sign.entry.is_generic else 2, False, True, 0)
    assert sign.entry is not None
    return (_specificity(sign.entry), sign.entry.is_site, sign.entry.role == "root", len(sign.entry.pattern))
