"""Check a site's entry before it is accepted: its own two lines, and a long log without slowing the search.

RE2 is linear, and still a pattern may take a minute for five megabytes. So whatever a person submits is tried by
`subprocess_trial`, in a process of its own; this module is what that process runs:

    python -m diagnosis.trial.checks < {"entry": {…}, "others": [{…}, …]} > {"findings": […], "seconds": 0.04, …}
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import re2

from diagnosis import offline
from diagnosis.causes import CAUSES
from diagnosis.logs.prefixes import parse_prefix
from diagnosis.logs.tracebacks import Traceback
from diagnosis.regex import options, unbounded
from diagnosis.signatures.catalogue import Catalogue, as_site_entry, extended_catalogue, shipped_catalogue
from diagnosis.signatures.entry import FIELDS, BadEntry, Entry, parse_entry
from diagnosis.signatures.operations import operations
from diagnosis.signatures.prefilter import Prefilter
from diagnosis.signatures.required_words import required_words
from diagnosis.signs.log_signs import matches_traceback
from diagnosis.trial import reference_log
from vigil_core.masking import masked

SECONDS = 0.5  # of CPU time, for all patterns of an entry over the reference log
MEMORY = 8 << 20  # bytes that RE2 may use for each pattern
PREFILTER_FACTOR, PREFILTER_EXTRA_S = 2.0, 0.02  # how much the prefilter may slow down on a healthy log
CPU_SECONDS = 10  # after which the kernel ends the process
ADDRESS_SPACE_BYTES = 2 << 30  # bytes of memory that it may allocate
MAX_HEALTHY_SHARE = 0.02  # of the lines of a healthy log, that an entry may find at most
RARE = 1_000  # a pattern is rare if it matches fewer than one in this many lines of a healthy log
SLICE_BYTES = 16 << 10  # of the reference between two checks of the time
MAX_LENGTHS = {
    "name": 64, "cause": 32, "source": 300, "pattern": 1000, "unless": 500, "exception": 300, "frame": 300,
    "advice": 1000, "example": 1000, "look_alike": 1000,
}  # fmt: skip
MAX_WORDS = 16  # of a list
GROUPS = 50  # "(" in one pattern
SHOWN_NAMES = 4  # names in a sentence
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(?:\.[a-z0-9][a-z0-9_-]*)*")

Level = Literal["error", "warn", "notice"]


@dataclass(frozen=True, slots=True)
class TrialFinding:
    """A result of a trial; an *error* rejects the entry. `field` is the entry's, or "" for the whole."""

    level: Level
    field: str
    text: str


@dataclass(slots=True)
class EntryTrial:
    """The result of trying an entry. `seconds` is the CPU time for the first `megabytes` of the reference log."""

    findings: list[TrialFinding] = field(default_factory=list)
    seconds: float | None = None
    megabytes: float = 0.0

    @property
    def is_fit(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def errors(self) -> list[TrialFinding]:
        return [finding for finding in self.findings if finding.level == "error"]

    def add(self, level: Level, about: str, text: str) -> None:
        self.findings.append(TrialFinding(level, about, text))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_fit": self.is_fit}


def run_trial(raw: Mapping[str, Any], others: tuple[Entry, ...] = ()) -> EntryTrial:
    """Try an entry alongside the site's other entries. It may take seconds, and a hundred megabytes."""
    trial = EntryTrial()
    entry = check_fields(raw, trial)
    for step in (_check_patterns, _check_lines, _measure, _check_against_others):
        if entry is None or not trial.is_fit:
            return trial
        step(entry, others, trial)
    return trial


# The entry by itself.


def check_fields(raw: Mapping[str, Any], trial: EntryTrial) -> Entry | None:
    """Return the entry if its fields are valid, else None; adds findings to `trial`. No pattern is run."""
    for name, most in MAX_LENGTHS.items():
        text = raw.get(name)
        if isinstance(text, str) and len(text) > most:
            trial.add("error", name, f"Longer than {most:,} characters.")
        if isinstance(text, str) and not text.replace("\t", " ").replace("\n", " ").isprintable():
            trial.add("error", name, "Contains characters that cannot be printed.")
    try:
        entry = as_site_entry(parse_entry(raw))
    except BadEntry as error:
        trial.add("error", _field_of(str(error)), _sentence(error))
        return None
    if not _NAME.fullmatch(entry.name):
        trial.add("error", "name", "Use lower-case letters, digits, - and _, in parts with dots: storage.ours_down.")
    for name in ("example", "look_alike"):
        if not getattr(entry, name).strip():
            what = "a line that it matches" if name == "example" else "a similar line that it must not match"
            trial.add("error", name, f"It needs {what}.")
        elif "\n" in getattr(entry, name):
            trial.add("error", name, "Must be one line.")
    for name in sorted({*entry.during[:MAX_WORDS]} - {operation.name for operation in operations()}):
        allowed = ", ".join(sorted(operation.name for operation in operations()))
        trial.add("error", "during", f"Unknown operation {name[:40]!r}. Choose from {allowed}.")
    for name in ("during", "frameworks"):
        words = getattr(entry, name)
        if len(words) > MAX_WORDS or any(
            not _NAME.fullmatch(word) or len(word) > MAX_LENGTHS["name"] for word in words
        ):
            trial.add("error", name, f"At most {MAX_WORDS} words of lower-case letters, digits, -, _ and dots.")
    return entry


def _field_of(message: str) -> str:
    """Return the field that a BadEntry is about, by the word in its message."""
    words = re.findall(r"\w+", message.partition(": ")[2])
    return next((name for name in words if name in FIELDS), "pattern")


def _sentence(error: BadEntry) -> str:
    text = str(error).partition(": ")[2] or str(error)
    text = text.replace(" (diagnosis/causes.py)", f". Causes are {', '.join(CAUSES)}")
    return f"{text[:1].upper()}{text[1:]}."


def _check_patterns(entry: Entry, others: tuple[Entry, ...], trial: EntryTrial) -> None:
    for name, pattern in entry.patterns.items():
        if pattern.count("(") > GROUPS:
            trial.add("error", name, f"More than {GROUPS} groups.")
            continue
        try:
            made = _compiled(pattern)
        except re2.error as error:
            reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
            trial.add(
                "error", name, f"RE2 rejects it within {MEMORY >> 20} MiB: {reason}. Look-around is not supported."
            )
            continue
        if name in {"pattern", "exception"} and made.search(b"") is not None:
            trial.add("error", name, "It matches an empty line, and so every line.")


def _compiled(pattern: str) -> Any:
    return re2.compile(b"(?m)" + unbounded(pattern).encode(), options(max_mem=MEMORY))


def _check_lines(entry: Entry, others: tuple[Entry, ...], trial: EntryTrial) -> None:
    try:
        alone = Catalogue([entry])
        is_found, is_taken = entry_matches(entry, entry.example, alone), entry_matches(entry, entry.look_alike, alone)
        prefilter = Prefilter(alone)
    except (re2.error, BadEntry, RecursionError) as error:
        trial.add("error", "pattern", f"Cannot be combined with other entries: {error}.")
        return
    if not is_found:
        trial.add("error", "example", "It does not match this line.")
    elif not entry.is_for_tracebacks and prefilter.search(entry.example.encode()) is None:
        trial.add(
            "error",
            "pattern",
            "The prefilter would skip its example. Begin the pattern with words that the line always has.",
        )
    if is_taken:
        trial.add("error", "look_alike", "It matches this line too. Make the pattern more specific, or use `unless`.")
    for name in ("example", "look_alike"):
        if masked(getattr(entry, name)) != getattr(entry, name):
            trial.add("error", name, "Looks like it contains a password or a token. Remove it.")


def entry_matches(entry: Entry, line: str, catalogue: Catalogue) -> bool:
    """Return whether an entry matches a line. For a traceback that is its last line; its frames are taken to match."""
    words = line[parse_prefix(line).length :]
    if not entry.is_for_tracebacks:
        return any(found.name == entry.name for found in catalogue.entries_matching(words.encode()))
    kind, _, message = words.partition(": ")
    return matches_traceback(replace(entry, frame="", during=()), Traceback(1, 1, kind, message), (), catalogue)


# Speed over a long log.


def _measure(entry: Entry, others: tuple[Entry, ...], trial: EntryTrial) -> None:
    """Measure the CPU time over the reference log, so that other load on this machine is not held against the entry."""
    healthy = reference_log.healthy_log()
    text = reference_log.near_matches(entry.example) + healthy
    began, read, match_count = time.process_time(), 0, 0
    sample = b""
    for name, pattern in entry.patterns.items():
        search, at = _compiled(pattern).search, 0
        for at, piece in _slices(text):
            for line in _matching_lines(search, piece):
                if name == "pattern" and at >= reference_log.NEAR_BYTES:
                    match_count, sample = match_count + 1, sample or line
            if time.process_time() - began > SECONDS:
                break
        read = max(read, at + SLICE_BYTES) if name == "pattern" else read or at + SLICE_BYTES
        if time.process_time() - began > SECONDS:
            break
    trial.seconds, trial.megabytes = time.process_time() - began, min(read, len(text)) / 1e6
    if trial.seconds > SECONDS:
        trial.add(
            "error", "pattern",
            f"It took {trial.seconds:.1f} s for {trial.megabytes:.1f} MB of a log; the limit is {SECONDS} s for "
            f"{len(text) / 1e6:.0f} MB. Use fewer counts like {{2,500}} and more fixed words.",
        )  # fmt: skip
        return
    if match_count and not entry.is_for_tracebacks:
        line_text = masked(sample.decode(errors="replace"))[:160]
        lines = healthy.count(b"\n")
        level: Level = "error" if match_count > lines * MAX_HEALTHY_SHARE else "warn"
        trial.add(level, "pattern", f"It matches {match_count:,} of {lines:,} lines of healthy runs: {line_text}")
    _measure_prefilter(entry, others, healthy, trial)


def _slices(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of pieces of whole lines, or of a line that is longer than a piece."""
    at = 0
    while at < len(text):
        end = text.rfind(b"\n", at, at + SLICE_BYTES) + 1 or min(len(text), at + SLICE_BYTES)
        yield at, text[at:end]
        at = end


def _matching_lines(search: Callable[..., Any], piece: bytes) -> Iterator[bytes]:
    """Yield the lines with a match, going from one to the next as the scanner does."""
    at = 0
    while (hit := search(piece, at)) is not None:
        start, end = piece.rfind(b"\n", 0, hit.start()) + 1, piece.find(b"\n", hit.start())
        yield piece[start : end if end >= 0 else len(piece)]
        if end < 0:
            return
        at = end + 1


def _measure_prefilter(entry: Entry, others: tuple[Entry, ...], healthy: bytes, trial: EntryTrial) -> None:
    """Measure how much the entry slows the prefilter, through which every byte of every log goes."""
    if entry.is_for_tracebacks or _is_rare(entry, healthy):
        return
    without = tuple(other for other in others if other.name != entry.name)
    try:
        after = _prefilter_seconds(Prefilter(extended_catalogue((*without, entry))), healthy)
    except re2.error as error:
        trial.add("error", "pattern", f"Cannot be combined with the other entries: {error}.")
        return
    before = _prefilter_seconds(Prefilter(extended_catalogue(without)), healthy)
    if after > before * PREFILTER_FACTOR + PREFILTER_EXTRA_S:
        trial.add(
            "error", "pattern",
            f"It would slow down the reading of every log: {after:.2f} s instead of {before:.2f} s for "
            f"{len(healthy) / 1e6:.0f} MB. Add a few words that the line always has and other lines do not.",
        )  # fmt: skip


def _is_rare(entry: Entry, healthy: bytes) -> bool:
    """Return whether the entry adds only a few words to the prefilter that healthy logs hardly contain."""
    if not required_words(entry.pattern):
        return False
    search = re2.compile(b"|".join(Catalogue([entry]).prefilter_parts), options(never_capture=True)).search
    return sum(1 for _ in _matching_lines(search, healthy)) * RARE < healthy.count(b"\n")


def _prefilter_seconds(prefilter: Prefilter, text: bytes) -> float:
    """Return the least CPU time of three rounds, as the first builds what the others use.

    A round that is too slow anyway is stopped and extrapolated to the whole text.
    """
    least = float("inf")
    for _ in range(3):
        began = time.process_time()
        for at, piece in _slices(text):
            for _ in _matching_lines(prefilter.search, piece):
                pass
            if (took := time.process_time() - began) > SECONDS:
                return min(least, took * len(text) / (at + len(piece)))
        least = min(least, time.process_time() - began)
    return least


# Alongside the other entries.


def _check_against_others(entry: Entry, others: tuple[Entry, ...], trial: EntryTrial) -> None:
    """Find other entries whose lines it matches too, and what its example is diagnosed as with all entries."""
    alone = Catalogue([entry])
    shipped = {other.name for other in shipped_catalogue()}
    if entry.name in shipped:
        trial.add("warn", "name", "Replaces the built-in entry of this name.")
    theirs = [other for other in (*shipped_catalogue(), *others) if other.name != entry.name and other.example]
    shared = [other.name for other in theirs if entry_matches(entry, other.example, alone)]
    if shared:
        more = f" and {len(shared) - SHOWN_NAMES:,} more" if len(shared) > SHOWN_NAMES else ""
        trial.add("notice", "pattern", f"It also matches the examples of {', '.join(shared[:SHOWN_NAMES])}{more}.")
    if entry.is_for_tracebacks or entry.role not in {"root", "echo"}:
        return
    combined = extended_catalogue((*(other for other in others if other.name != entry.name), entry))
    verdict = offline.diagnose_text(entry.example + "\n", "example", combined)
    if entry.role == "root" and verdict.cause != entry.cause:
        by = f", by {verdict.entry}" if verdict.entry else ""
        trial.add("warn", "example", f"With all entries, this line by itself is diagnosed as {verdict.cause}{by}.")


def main() -> int:
    """Read a request from stdin, try the entry within limits of CPU and memory, and write the result to stdout."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    request = json.load(sys.stdin)
    others = tuple(as_site_entry(parse_entry(raw)) for raw in request["others"])
    json.dump(run_trial(request["entry"], others).as_json(), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
