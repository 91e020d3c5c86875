"""What an entry of a site has to stand before it is taken in: its own two lines, and a long log without slowing it.

RE2 is linear, and still a pattern may take a minute for five megabytes. So whatever a person sends is tried by
`trial_apart`, in a process of its own; this is what that process does:

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
from diagnosis.logs.prefixes import prefix_of
from diagnosis.logs.tracebacks import Traceback
from diagnosis.regex import options, unbounded
from diagnosis.signatures.catalogue import Catalogue, extended, of_site, shipped_catalogue
from diagnosis.signatures.entry import FIELDS, BadEntry, Entry, entry_of
from diagnosis.signatures.operations import operations
from diagnosis.signatures.prefilter import Sieve
from diagnosis.signatures.required_words import words_of
from diagnosis.signs.log_signs import fits
from diagnosis.trial import reference_log
from vigil_core.masking import masked

SECONDS = 0.5  # of one core, for all that an entry looks for, over the reference
MEMORY = 8 << 20  # bytes that RE2 may take for each of its patterns
SIEVE_TIMES, SIEVE_MORE_S = 2.0, 0.02  # how much longer the sieve of all entries may take for a healthy log
CPU_SECONDS = 10  # after which the kernel ends the process
ADDRESSES = 2 << 30  # bytes of memory that it may ask for
HEALTHY = 0.02  # of the lines of a healthy log, that an entry may find at most
RARE = 1_000  # of so many lines of a healthy log fewer than one
SLICE = 16 << 10  # of the reference between two looks at the clock
LONGEST = {
    "name": 64, "cause": 32, "source": 300, "pattern": 1000, "unless": 500, "exception": 300, "frame": 300,
    "advice": 1000, "example": 1000, "look_alike": 1000,
}  # fmt: skip
MOST_WORDS = 16  # of a list
GROUPS = 50  # "(" in one pattern
SHOWN = 4  # names in a sentence
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(?:\.[a-z0-9][a-z0-9_-]*)*")

Level = Literal["error", "warn", "notice"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found; an *error* keeps the entry out. `field`: whose, "" where it is of the whole."""

    level: Level
    field: str
    text: str


@dataclass(slots=True)
class Trial:
    """How an entry did. `seconds`: that it took over the first `megabytes` of the reference."""

    findings: list[Finding] = field(default_factory=list)
    seconds: float | None = None
    megabytes: float = 0.0

    @property
    def is_fit(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    def say(self, level: Level, about: str, text: str) -> None:
        self.findings.append(Finding(level, about, text))

    def told(self) -> dict[str, Any]:
        return {**asdict(self), "is_fit": self.is_fit}


def tried(raw: Mapping[str, Any], others: tuple[Entry, ...] = ()) -> Trial:
    """Try an entry as it was written, beside the others of its site. It may take seconds, and a hundred megabytes."""
    trial = Trial()
    entry = read(raw, trial)
    for step in (_check_patterns, _check_lines, _measure, _look_around):
        if entry is None or not trial.is_fit:
            return trial
        step(entry, others, trial)
    return trial


# By itself.


def read(raw: Mapping[str, Any], trial: Trial) -> Entry | None:
    """The entry, if its fields are what they should be; no pattern is tried."""
    for name, most in LONGEST.items():
        text = raw.get(name)
        if isinstance(text, str) and len(text) > most:
            trial.say("error", name, f"It is longer than {most:,} letters.")
        if isinstance(text, str) and not text.replace("\t", " ").replace("\n", " ").isprintable():
            trial.say("error", name, "There is something in it that can't be printed.")
    try:
        entry = of_site(entry_of(raw))
    except BadEntry as error:
        trial.say("error", _field_of(str(error)), _sentence(error))
        return None
    if not _NAME.fullmatch(entry.name):
        trial.say("error", "name", "A name is small letters, digits, - and _, in parts with dots: storage.ours_down.")
    for name in ("example", "look_alike"):
        if not getattr(entry, name).strip():
            what = "a line that it finds" if name == "example" else "a line that only looks like it"
            trial.say("error", name, f"It needs {what}.")
        elif "\n" in getattr(entry, name):
            trial.say("error", name, "It is one line.")
    for name in sorted({*entry.during[:MOST_WORDS]} - {operation.name for operation in operations()}):
        known = ", ".join(sorted(operation.name for operation in operations()))
        trial.say("error", "during", f"{name[:40]!r} is nothing that is told by frames. Take of {known}.")
    for name in ("during", "frameworks"):
        words = getattr(entry, name)
        if len(words) > MOST_WORDS or any(not _NAME.fullmatch(word) or len(word) > LONGEST["name"] for word in words):
            trial.say("error", name, f"It is at most {MOST_WORDS} words, small letters, digits, -, _ and dots.")
    return entry


def _field_of(said: str) -> str:
    """Whose fault a BadEntry tells of, by the word that it has of it."""
    words = re.findall(r"\w+", said.partition(": ")[2])
    return next((name for name in words if name in FIELDS), "pattern")


def _sentence(error: BadEntry) -> str:
    text = str(error).partition(": ")[2] or str(error)
    text = text.replace(" (diagnosis/causes.py)", f". Causes are {', '.join(CAUSES)}")
    return f"{text[:1].upper()}{text[1:]}."


def _check_patterns(entry: Entry, others: tuple[Entry, ...], trial: Trial) -> None:
    for name, pattern in entry.patterns.items():
        if pattern.count("(") > GROUPS:
            trial.say("error", name, f"It has more than {GROUPS} groups.")
            continue
        try:
            made = _compiled(pattern)
        except re2.error as error:
            said = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
            trial.say("error", name, f"RE2 refuses it within {MEMORY >> 20} MiB: {said}. It knows no look-around.")
            continue
        if name in {"pattern", "exception"} and made.search(b"") is not None:
            trial.say("error", name, "It matches an empty line, so every one.")


def _compiled(pattern: str) -> Any:
    return re2.compile(b"(?m)" + unbounded(pattern).encode(), options(max_mem=MEMORY))


def _check_lines(entry: Entry, others: tuple[Entry, ...], trial: Trial) -> None:
    try:
        alone = Catalogue([entry])
        is_found, is_taken = finds(entry, entry.example, alone), finds(entry, entry.look_alike, alone)
        sieve = Sieve(alone)
    except (re2.error, BadEntry, RecursionError) as error:
        trial.say("error", "pattern", f"It can't be put beside others: {error}.")
        return
    if not is_found:
        trial.say("error", "example", "It does not find this line.")
    elif not entry.reads_tracebacks and sieve.search(entry.example.encode()) is None:
        trial.say("error", "pattern", "The sieve would pass its example over. Begin with words that it always has.")
    if is_taken:
        trial.say("error", "look_alike", "It finds this line too. Say more in the pattern, or in `unless`.")
    for name in ("example", "look_alike"):
        if masked(getattr(entry, name)) != getattr(entry, name):
            trial.say("error", name, "There is something like a password or a token in it. Take that out.")


def finds(entry: Entry, line: str, known: Catalogue) -> bool:
    """Whether an entry finds a line. Of a traceback that is its last, and the frames are taken to be right."""
    own = line[prefix_of(line).length :]
    if not entry.reads_tracebacks:
        return any(one.name == entry.name for one in known.on(own.encode()))
    kind, _, message = own.partition(": ")
    return fits(replace(entry, frame="", during=()), Traceback(1, 1, kind, message), (), known)


# Over a long log.


def _measure(entry: Entry, others: tuple[Entry, ...], trial: Trial) -> None:
    """Seconds are those of the processor: what else goes on here is no fault of the entry."""
    healthy = reference_log.ordinary()
    text = reference_log.near(entry.example) + healthy
    began, read, found = time.process_time(), 0, 0
    sample = b""
    for name, pattern in entry.patterns.items():
        search, at = _compiled(pattern).search, 0
        for at, piece in _slices(text):
            for line in _found(search, piece):
                if name == "pattern" and at >= reference_log.NEAR:
                    found, sample = found + 1, sample or line
            if time.process_time() - began > SECONDS:
                break
        read = max(read, at + SLICE) if name == "pattern" else read or at + SLICE
        if time.process_time() - began > SECONDS:
            break
    trial.seconds, trial.megabytes = time.process_time() - began, min(read, len(text)) / 1e6
    if trial.seconds > SECONDS:
        trial.say(
            "error", "pattern",
            f"It took {trial.seconds:.1f} s for {trial.megabytes:.1f} MB of a log; it may take {SECONDS} s for "
            f"{len(text) / 1e6:.0f} MB. Have fewer counts like {{2,500}}, and words that stand fixed.",
        )  # fmt: skip
        return
    if found and not entry.reads_tracebacks:
        said = masked(sample.decode(errors="replace"))[:160]
        lines = healthy.count(b"\n")
        level: Level = "error" if found > lines * HEALTHY else "warn"
        trial.say(level, "pattern", f"It finds {found:,} of {lines:,} lines of runs in which nothing is wrong: {said}")
    _measure_sieve(entry, others, healthy, trial)


def _slices(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Pieces of whole lines, or of a line that is longer than one."""
    at = 0
    while at < len(text):
        end = text.rfind(b"\n", at, at + SLICE) + 1 or min(len(text), at + SLICE)
        yield at, text[at:end]
        at = end


def _found(search: Callable[..., Any], piece: bytes) -> Iterator[bytes]:
    """The lines in which something is found, as the scanner goes from one to the next."""
    at = 0
    while (hit := search(piece, at)) is not None:
        start, end = piece.rfind(b"\n", 0, hit.start()) + 1, piece.find(b"\n", hit.start())
        yield piece[start : end if end >= 0 else len(piece)]
        if end < 0:
            return
        at = end + 1


def _measure_sieve(entry: Entry, others: tuple[Entry, ...], healthy: bytes, trial: Trial) -> None:
    """What it adds to the sieve, through which every byte of every log goes."""
    if entry.reads_tracebacks or _is_rare(entry, healthy):
        return
    without = tuple(one for one in others if one.name != entry.name)
    try:
        after = _sieve_seconds(Sieve(extended((*without, entry))), healthy)
    except re2.error as error:
        trial.say("error", "pattern", f"It can't be put beside the others: {error}.")
        return
    before = _sieve_seconds(Sieve(extended(without)), healthy)
    if after > before * SIEVE_TIMES + SIEVE_MORE_S:
        trial.say(
            "error", "pattern",
            f"It would make the reading of every log slower: {after:.2f} s instead of {before:.2f} s for "
            f"{len(healthy) / 1e6:.0f} MB. Give it a few words that the line always has and other lines have not.",
        )  # fmt: skip


def _is_rare(entry: Entry, healthy: bytes) -> bool:
    """Whether all that the sieve has to look for are a few words more, that healthy logs hardly have."""
    if not words_of(entry.pattern):
        return False
    search = re2.compile(b"|".join(Catalogue([entry]).sieve), options(never_capture=True)).search
    return sum(1 for _ in _found(search, healthy)) * RARE < healthy.count(b"\n")


def _sieve_seconds(sieve: Sieve, text: bytes) -> float:
    """Of the least of three rounds, as the first one builds what the others use; one where it is slow anyway, as far as
    it came, reckoned up to the whole text."""
    least = float("inf")
    for _ in range(3):
        began = time.process_time()
        for at, piece in _slices(text):
            for _ in _found(sieve.search, piece):
                pass
            if (took := time.process_time() - began) > SECONDS:
                return min(least, took * len(text) / (at + len(piece)))
        least = min(least, time.process_time() - began)
    return least


# Beside the others.


def _look_around(entry: Entry, others: tuple[Entry, ...], trial: Trial) -> None:
    """Whose lines it finds too, and what becomes of its example where all entries are asked."""
    alone = Catalogue([entry])
    shipped = {one.name for one in shipped_catalogue()}
    if entry.name in shipped:
        trial.say("warn", "name", "It takes the place of the entry that ships under this name.")
    theirs = [one for one in (*shipped_catalogue(), *others) if one.name != entry.name and one.example]
    shared = [one.name for one in theirs if finds(entry, one.example, alone)]
    if shared:
        more = f" and {len(shared) - SHOWN:,} more" if len(shared) > SHOWN else ""
        trial.say("notice", "pattern", f"It also finds what {', '.join(shared[:SHOWN])}{more} are for.")
    if entry.reads_tracebacks or entry.role not in {"root", "echo"}:
        return
    known = extended((*(one for one in others if one.name != entry.name), entry))
    verdict = offline.diagnose_text(entry.example + "\n", "example", known)
    if entry.role == "root" and verdict.cause != entry.cause:
        by = f", by {verdict.entry}" if verdict.entry else ""
        trial.say("warn", "example", f"All entries asked, this line by itself is {verdict.cause}{by}.")


def main() -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.load(sys.stdin)
    others = tuple(of_site(entry_of(raw)) for raw in asked["others"])
    json.dump(tried(asked["entry"], others).told(), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
