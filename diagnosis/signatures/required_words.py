"""Derive from a pattern words of which every match contains at least one, for the prefilter to search instead.

A thousand patterns in one automaton have more states than it can keep; their words alone make one that reads a log at
the speed of memory. What it finds too much is left to the filter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

Words = frozenset[tuple[str, bool]]
"""Each word, and whether its case is ignored."""
MIN_RARE_LETTERS = 6  # shorter ones are on every other line
MAX_LETTERS = 24
COMMON_WORDS = frozenset(
    """the a an of to in on at is was for with from and or not no as by be it that this are has have
    train training trainer checkpoint checkpoints processes process grad norm gradient loss step steps iteration
    iterations epoch epochs rank ranks node nodes error errors warning warnings memory model models data file files
    device devices gpu gpus cuda version number value values time total size input output batch batches config worker
    workers python torch load loading loaded save saving saved start starting started finished done info log logging
    job jobs task tasks module distributed backend group learning rate samples tokens validation evaluation""".split()  # noqa: SIM905
)  # words that lines are full of in which nothing is wrong
_PLAIN = r"\w ,:;'\"=/<>!@#%&~`-"
_TOKEN = re.compile(
    rf"(?P<run>[{_PLAIN}]+(?![*+?{{{_PLAIN}]))|"
    r"(?P<flags>\(\?[a-z-]+\))|(?P<open>\((?:\?(?:P<\w+>|[a-z-]*:))?)|(?P<close>\))|(?P<bar>\|)|"
    r"(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<count>[*+?]\??|\{(?P<least>\d+)(?:,\d*)?\}\??)|"
    r"(?P<class>\\[dDwWsSbBAzQE]|\\x..|[.^$])|\\(?P<escaped>.)|(?P<letter>.)",
    re.DOTALL,
)


def required_words(pattern: str) -> Words | None:
    """Return words, at least one of which is in every match; None if no choice of words is rare enough."""
    found = _PatternReader(pattern).alternatives()
    if found is None or min(map(_rarity, found)) < MIN_RARE_LETTERS:
        return None
    return frozenset(
        (word[:MAX_LETTERS].lower() if any_case else word[:MAX_LETTERS], any_case) for word, any_case in found
    )


@dataclass(slots=True)
class _Sequence:
    """One alternative as read so far: its best words, and the letters that stand side by side."""

    best: Words | None = None
    run: str = ""

    def end_run(self, any_case: bool) -> None:
        if self.run:
            self.offer(frozenset([(self.run, any_case)]))
        self.run = ""

    def offer(self, words: Words | None) -> None:
        if words and (self.best is None or _worth(words) > _worth(self.best)):
            self.best = words


class _PatternReader:
    """Read a pattern once, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._tokens = _TOKEN.finditer(pattern)
        self._any_case = False
        self._pending: re.Match[str] | None = None

    def alternatives(self) -> Words | None:
        """Read to the end of a group or the pattern; return words of every alternative, None if one has none."""
        any_case = self._any_case
        found: set[tuple[str, bool]] = set()
        is_whole, sequence = True, _Sequence()
        while (token := self._next()) is not None and not token["close"]:
            if token["bar"]:
                is_whole = self._add_alternative(sequence, found) and is_whole
                sequence = _Sequence()
            else:
                self._read_token(token, sequence)
        is_whole = self._add_alternative(sequence, found) and is_whole
        self._any_case = any_case
        return frozenset(found) if is_whole else None

    def _add_alternative(self, sequence: _Sequence, found: set[tuple[str, bool]]) -> bool:
        sequence.end_run(self._any_case)
        if sequence.best is None:
            return False
        found |= sequence.best
        return True

    def _read_token(self, token: re.Match[str], sequence: _Sequence) -> None:
        if token["run"]:
            sequence.run += token["run"]
            return
        letter = token["escaped"] or token["letter"]
        if letter is not None:
            times = self._repetitions()
            if times != 0:
                sequence.run += letter
            if times != 1:  # it may be there again, and then the letters around it do not stand side by side
                sequence.end_run(self._any_case)
            return
        sequence.end_run(self._any_case)
        if token["flags"]:
            self._any_case = "i" in token["flags"].partition("-")[0]
        elif token["open"]:
            before = self._any_case
            flags, _, without = token["open"].strip("(?:").partition("-")
            if not flags.startswith("P<"):
                self._any_case = (before or "i" in flags) and "i" not in without
            inner = self.alternatives()
            self._any_case = before
            if self._repetitions() != 0:
                sequence.offer(inner)
        elif token["set"] or token["class"]:
            self._repetitions()

    def _next(self) -> re.Match[str] | None:
        pending, self._pending = self._pending, None
        return pending if pending is not None else next(self._tokens, None)

    def _repetitions(self) -> int:
        """Return how often the last token must occur: 1 if no count follows, 0 if it may be missing, else 2."""
        token = self._next()
        if token is None or not token["count"]:
            self._pending = token
            return 1
        return 0 if token["count"][0] in "*?" or token["least"] == "0" else 2


def _worth(words: Words) -> tuple[int, int]:
    return min(map(_rarity, words), default=0), -len(words)


def _rarity(word: tuple[str, bool]) -> int:
    """Count the letters that do not belong to a word that every log is full of."""
    return _rarity_of(word[0])


@cache
def _rarity_of(word: str) -> int:
    parts = re.findall(r"[^\W\d_]+|[^\s\w]", word)
    return sum(len(part) for part in parts if not _is_common(part.lower()))


@cache
def _is_common(part: str) -> bool:
    """Return whether the letters are a common word or a piece of one."""
    return any(part in common for common in COMMON_WORDS)
