"""Expand Slurm's host expressions, such as `dgx[01-16,20],login1`, strictly and within a limit. No Django."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_NODES = 1_000
MAX_CHARACTERS = 2_000
MAX_BRACKETS_PER_NAME = 8
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class BadHostExpression(ValueError):
    """Raised for an expression that names no nodes, or too many; the message says where and why."""


def expand(expression: str, most: int = MAX_NODES, most_characters: int = MAX_CHARACTERS) -> list[str]:
    """Return the names in their order, each once. Raises BadHostExpression, before it makes more than `most` names.

    >>> expand("dgx[01-03,7],login")
    ['dgx01', 'dgx02', 'dgx03', 'dgx7', 'login']
    """
    text = expression.strip()
    if not text:
        raise BadHostExpression("Name at least one node, such as dgx[01-16,20].")
    if len(text) > most_characters:
        raise BadHostExpression(f"The expression has more than {most_characters:,} characters.")
    names: dict[str, None] = {}
    for part in _parts(text):
        if part.count("[") > MAX_BRACKETS_PER_NAME:  # each is one more level of recursion
            raise BadHostExpression(f"{part!r:.80} has more than {MAX_BRACKETS_PER_NAME} pairs of brackets.")
        for number, name in enumerate(_expand(part, most)):
            if not _NAME.fullmatch(name):
                raise BadHostExpression(f"{part.strip()!r:.80} is not the name of a node.")
            names[name] = None
            if len(names) > most or number > most:  # [1,1][1,1]… names few nodes very often
                raise BadHostExpression(f"The expression names more than {most:,} nodes.")
    if not names:
        raise BadHostExpression(f"{text!r:.40} names no node. Write for example dgx[01-16,20].")
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
    for number in _numbers(inside, part, most):
        for end in _expand(tail, most):
            yield f"{head}{number}{end}"


def _numbers(inside: str, part: str, most: int) -> Iterator[str]:
    """Yield 08 09 10 for "08-10", with as many digits as the first number has."""
    for piece in inside.split(","):
        found = _RANGE.fullmatch(piece.strip())
        if found is None:
            raise BadHostExpression(f"{piece!r:.40} in {part!r:.80} is not a number or range, such as 01-16.")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise BadHostExpression(f"The range {piece.strip()} in {part!r:.80} counts down.")
        if last - first >= most:
            raise BadHostExpression(f"The expression names more than {most:,} nodes.")
        width = len(found[1])
        yield from (f"{number:0{width}}" for number in range(first, last + 1))
