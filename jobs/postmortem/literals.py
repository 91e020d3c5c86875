"""Of a pattern, words of which every match holds one: what a sieve can look for in place of the pattern.

A thousand patterns in one automaton have more states than it can keep; their words alone make one that reads a log at
the speed of memory. What it finds too much is left to the filter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Words = frozenset[tuple[str, bool]]
"""Each word, and whether in any case."""
SHORTEST = 6  # shorter ones are on every other line
LONGEST = 24
COMMON = frozenset(
    """the a an of to in on at is was for with from and or not no as by be it that this are has have
    train training trainer checkpoint checkpoints process processes grad norm gradient loss step steps iteration
    iterations epoch epochs rank ranks node nodes error errors warning warnings memory model models data file files
    device devices gpu gpus cuda version number value values time total size input output batch batches config worker
    workers python torch load loading loaded save saving saved start starting started finished done info log logging
    job jobs task tasks module distributed backend group learning rate samples tokens validation evaluation""".split()
)  # words that lines are full of in which nothing is wrong


def words_of(pattern: str) -> Words | None:
    """The words, at least one of which is in whatever matches; None where there are none that are long enough."""
    try:
        tree = parser.parse(pattern)
    except re.error:
        return None
    found = _best(tree, bool(tree.state.flags & re.IGNORECASE))
    if found is None or min(map(_rarity, found)) < SHORTEST:
        return None
    return frozenset((word[:LONGEST].lower() if any_case else word[:LONGEST], any_case) for word, any_case in found)


def _best(items: Iterable[Any], any_case: bool) -> Words | None:
    """Of a sequence, all of which has to be there, the part whose shortest word is longest."""
    candidates: list[Words] = []
    run = ""
    for operation, value in items:
        if operation is codes.LITERAL:
            run += chr(value)
            continue
        if run:
            candidates.append(frozenset([(run, any_case)]))
            run = ""
        if (inner := _of(operation, value, any_case)) is not None:
            candidates.append(inner)
    if run:
        candidates.append(frozenset([(run, any_case)]))
    return max(candidates, key=_worth, default=None)


def _of(operation: Any, value: Any, any_case: bool) -> Words | None:
    if operation is codes.SUBPATTERN:
        _, add, remove, inner = value
        return _best(inner, (any_case or bool(add & re.IGNORECASE)) and not remove & re.IGNORECASE)
    if operation is codes.BRANCH:
        branches = [_best(branch, any_case) for branch in value[1]]
        if any(branch is None for branch in branches):
            return None
        return frozenset().union(*(branch for branch in branches if branch))
    if operation in (codes.MAX_REPEAT, codes.MIN_REPEAT) and value[0] >= 1:
        return _best(value[2], any_case)
    return None


def _worth(words: Words) -> tuple[int, int]:
    return min(map(_rarity, words), default=0), -len(words)


def _rarity(word: tuple[str, bool]) -> int:
    """How many letters of it are not of a word that every log is full of."""
    parts = re.findall(r"[^\W\d_]+|[^\s\w]", word[0])
    return sum(len(part) for part in parts if not _is_common(part.lower()))


@cache
def _is_common(part: str) -> bool:
    """Whether it is such a word, or a piece of one."""
    return any(part in common for common in COMMON)
