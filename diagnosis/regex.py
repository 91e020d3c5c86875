"""Compile patterns for RE2, and loosen them for a first pass over many lines."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import re2

MEMORY = 64 << 20  # bytes for the states that an automaton builds as it reads


def options(**values: Any) -> re2.Options:
    """Return RE2 options with bounded memory, Latin-1 bytes and no match across lines; `values` override them."""
    made = re2.Options()
    made.max_mem, made.encoding, made.log_errors = MEMORY, re2.Options.Encoding.LATIN1, False
    made.never_nl = True
    for name, value in values.items():
        setattr(made, name, value)
    return made


_BOUND = re.compile(r"(?<!\\)\{(?P<least>[01]),(?P<most>\d+)\}")
BOUND = 8
_TOKENS = re.compile(r"\\x[0-9a-fA-F]{2}|\\.|\{[\d,]+\}|\(\?P<\w+>|\[\^?\]?(?:\\.|[^\]\\])*\]|\d|.", re.DOTALL)
DIGIT = re.compile(r"(?<![{,\d])\d(?![\d,]*\})")  # except in a count like {2,5}


def unbounded(pattern: str) -> str:
    """Return the pattern with large counts such as {0,200} replaced by * or +.

    Each count costs the engine as many states.
    """

    def loosened(bound: re.Match[str]) -> str:
        return bound[0] if int(bound["most"]) < BOUND else "*" if bound["least"] == "0" else "+"

    return _BOUND.sub(loosened, pattern)


@cache
def digit_agnostic(pattern: str) -> str:
    """Return the pattern with every digit replaced by "any digit", so that a line's numbers do not matter."""

    def any_digit(token: re.Match[str]) -> str:
        text = token[0]
        if text.isdigit():
            return r"\d"
        if text.startswith("[") and re.search(r"\d", text) and "0-9" not in text:
            return f"{text[:-1]}\\d]" if not text.startswith("[^") else text
        return text

    return _TOKENS.sub(any_digit, pattern) if DIGIT.search(pattern) else pattern
