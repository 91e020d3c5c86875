"""Expand Slurm's host expressions, such as `dgx[01-16,20],r[1-2]n[1-4]`, within limits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

MAX_NODES = 1_000
MAX_CHARACTERS = 2_000
MAX_BRACKETS_PER_NAME = 8
MAX_REPEATS = 2  # times the limit: as many names with repeats, as [1,1][1,1]… names few nodes very often
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class BadHostExpression(ValueError):
    """Raised for an expression that names no nodes, or too many; the message says where and why."""


def expand(expression: str, most: int = MAX_NODES, most_characters: int = MAX_CHARACTERS) -> list[str]:
    """Return the names in their order, each once. Raises BadHostExpression, before it makes more than `most` names.

    >>> expand("dgx[01-03,7],login")
    ['dgx01', 'dgx02', 'dgx03', 'dgx7', 'login']
    """
    if not expression.strip():
        raise BadHostExpression("Name at least one node, such as dgx[01-16,20].")
    return expand_all([expression], most, most_characters)


def expand_all(expressions: Sequence[str], most: int = MAX_NODES, most_characters: int = MAX_CHARACTERS) -> list[str]:
    """Expand several expressions, each of which names a node, within limits that they share."""
    if sum(map(len, expressions)) > most_characters:
        raise BadHostExpression(f"The expression has more than {most_characters:,} characters.")
    for text in expressions:
        if not text.replace(",", " ").split():
            raise BadHostExpression(f"{text!r:.40} names no node. Write for example dgx[01-16,20].")
    return _expand_all(expressions, most, _NAME)


def expand_reported(expressions: Sequence[str], most: int) -> tuple[str, ...]:
    """Expand what a scheduler reports, where names may have any characters; () if it is malformed or too long."""
    try:
        return tuple(_expand_all(expressions, most, None))
    except BadHostExpression:
        return ()


def _expand_all(expressions: Sequence[str], most: int, valid: re.Pattern[str] | None) -> list[str]:
    names: dict[str, None] = {}
    written = 0
    for part in (part for text in expressions for part in _parts(text)):
        if part.count("[") > MAX_BRACKETS_PER_NAME:  # each is one more level of recursion
            raise BadHostExpression(f"{part!r:.80} has more than {MAX_BRACKETS_PER_NAME} pairs of brackets.")
        for name in _expand(part, most):
            if valid and not valid.fullmatch(name):
                raise BadHostExpression(f"{part!r:.80} is not the name of a node. Write dgx01, or dgx[01-16].")
            names[name] = None
            written += 1
            if len(names) > most or written > MAX_REPEATS * most:
                raise BadHostExpression(f"The expression names more than {most:,} nodes.")
    return list(names)


def _parts(text: str) -> Iterator[str]:
    """Yield the parts between commas and white space outside of brackets."""
    depth, part = 0, ""
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise BadHostExpression(f"The brackets of {text!r:.80} do not match.")
        if not depth and (letter == "," or letter.isspace()):
            if part:
                yield part
            part = ""
        else:
            part += letter
    if depth:
        raise BadHostExpression(f"The brackets of {text!r:.80} do not match.")
    if part:
        yield part


def _expand(part: str, most: int) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, tail = rest.partition("]")
    for number in expand_numbers(inside, most):
        for end in _expand(tail, most):
            yield f"{head}{number}{end}"


def expand_numbers(text: str, most: int) -> Iterator[str]:
    """Yield 08 09 10 7 for "08-10,7", with as many digits as the first number of a range has."""
    for piece in text.split(","):
        found = _RANGE.fullmatch(piece.strip())
        if found is None:
            raise BadHostExpression(f"{piece!r:.40} in [{text:.80}] is not a number or range, such as 01-16.")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise BadHostExpression(f"The range {piece.strip()} in [{text:.80}] counts down.")
        if last - first >= most:
            raise BadHostExpression(f"The expression names more than {most:,} nodes.")
        width = len(found[1])
        yield from (f"{number:0{width}}" for number in range(first, last + 1))
