"""Patterns in RE2's syntax: options, and the looser patterns that stand in for them in a first pass."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import re2

MEMORY = 64 << 20  # of the sieve and of the set, for the states that they build as they read


def options(**values: Any) -> re2.Options:
    made = re2.Options()
    made.max_mem, made.encoding, made.log_errors = MEMORY, re2.Options.Encoding.LATIN1, False
    made.never_nl = True
    for name, value in values.items():
        setattr(made, name, value)
    return made


_BOUND = re.compile(r"(?<!\\)\{(?P<least>[01]),(?P<most>\d+)\}")
BOUND = 8
_TOKENS = re.compile(r"\\x[0-9a-fA-F]{2}|\\.|\{[\d,]+\}|\(\?P<\w+>|\[\^?\]?(?:\\.|[^\]\\])*\]|\d|.", re.DOTALL)
DIGIT = re.compile(r"(?<![{,\d])\d(?![\d,]*\})")  # but in a count


def unbounded(pattern: str) -> str:
    """The pattern without bounds of what may be between words: each would cost the engine as many states."""

    def free(bound: re.Match[str]) -> str:
        return bound[0] if int(bound["most"]) < BOUND else "*" if bound["least"] == "0" else "+"

    return _BOUND.sub(free, pattern)


@cache
def blinded(pattern: str) -> str:
    """The pattern with any digit for each of its digits, so that it matches a line whatever its numbers are."""

    def blind(token: re.Match[str]) -> str:
        text = token[0]
        if text.isdigit():
            return r"\d"
        if text.startswith("[") and re.search(r"\d", text) and "0-9" not in text:
            return f"{text[:-1]}\\d]" if not text.startswith("[^") else text
        return text

    return _TOKENS.sub(blind, pattern) if DIGIT.search(pattern) else pattern
