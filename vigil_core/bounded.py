"""Read TOML and JSON from outside, with bounds on the cost of parsing.

A parser's cost is not always in proportion to the bytes: `a.a.a. … = 1` with 32,700 parts took `tomllib` 140 s and
4.7 GB, 6,600 lines `a.k1 = 1` below one table take `tomlkit` minutes, and a list of empty lists takes 25 times its own
size. So the text is scanned first, in time and memory proportional to its length, for how deep it nests and how many
values it has; only then is it parsed. Every endpoint that accepts such text reads it here.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


class TooComplex(ValueError):
    """The text is nested too deeply or has too many values. The message says which, and the limit."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits on what a text holds.

    `depth` counts lists and tables inside each other, and the parts of a dotted key. `items` counts keys, headers and
    values in lists. `dots` counts all dots in keys and headers together.
    """

    depth: int
    items: int
    dots: int = 500  # tomlkit is quadratic in dotted keys below one header: 500 of them take 0.4 s, 6,600 take minutes


# The largest specification that is accepted holds some 3,000 values: a sweep's 1,000, 1,000 arguments of a script, 400
# variables, 400 nodes. Tables lie three deep, and eight levels are what `jobs.spec` looks through.
SPECIFICATION = Bounds(depth=8, items=5_000)
# What people and scripts send to the API: 10,000 places in racks are 50,000 items.
REQUEST = Bounds(depth=32, items=60_000)

_TOKENS = re.compile(
    r'''
    """(?:[^"\\]++|\\.|"(?!""))*+(?:"{3,5})?
  | \'\'\'(?:[^']++|'(?!''))*+(?:'{3,5})?
  | "(?:[^"\\\n]++|\\[^\n])*+"?
  | '[^'\n]*+'?
  | \#[^\n]*+
  | (?P<mark>[\[\]{},.=\n])
  | (?P<number>0[xob][0-9A-Fa-f_]{100,})
    ''',
    re.VERBOSE | re.DOTALL,
)
_STRINGS = re.compile(rb'"[^"]*"?')
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = [0] * 256
_STEP[ord("[")], _STEP[ord("]")] = 1, -1


def toml(text: str, bounds: Bounds = SPECIFICATION) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises TooComplex before parsing where it is out of bounds, and tomllib.TOMLDecodeError (or another ValueError, for
    a number of thousands of digits) where it is not TOML.
    """
    check_toml(text, bounds)
    return tomllib.loads(text)


def check_toml(text: str, bounds: Bounds = SPECIFICATION) -> None:
    """Refuse a TOML text that is out of bounds, by TooComplex with the line; whether it is valid is not checked.

    Up to the first syntax error it sees the same strings, comments and brackets as a parser does, and parsers stop
    there.
    """
    depth = items = dots = parts = 0
    line, in_header, at_start = 1, False, True
    for token in _TOKENS.finditer(text):
        mark = token["mark"]
        if token["number"]:  # in base 10 Python refuses such a number anyway
            raise TooComplex(f"Line {line}: a number has more than 100 digits. Write it as a text in quotes.")
        if mark is None:
            line += token[0].count("\n")
            continue
        if mark == ".":
            parts += 1
            if parts >= bounds.depth:
                raise TooComplex(f"Line {line}: a key of more than {bounds.depth} parts. Use tables, like [run].")
            continue
        if mark == "=" or in_header:
            dots += parts
            if dots > bounds.dots:
                raise TooComplex(f"Line {line}: more than {bounds.dots} dots in keys. Use tables, like [run].")
        parts = 0
        if mark == "\n":
            line += 1
            at_start, in_header = depth == 0, False
            continue
        if mark in "[{":
            in_header = in_header or (at_start and mark == "[")
            depth += 1
            if depth > bounds.depth:
                raise TooComplex(
                    f"Line {line}: lists and tables more than {bounds.depth} deep. Use tables, like [run]."
                )
        elif mark in "]}":
            depth = max(0, depth - 1)
        at_start = False
        items += mark in "=,[{"
        if items > bounds.items:
            raise TooComplex(f"Line {line}: more than {bounds.items:,} keys and values. Move data into separate files.")


def json_object(text: str, bounds: Bounds = REQUEST) -> dict[str, Any]:
    """Return the object of a JSON text. Raises TooComplex, or another ValueError if it is none; NaN is refused."""
    check_json(text.encode("utf-8", "surrogatepass"), bounds)
    found = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return found


def check_json(body: bytes, bounds: Bounds = REQUEST) -> None:
    """Refuse a JSON text that is out of bounds, by TooComplex; whether it is valid is not checked.

    Nearly all texts pass by counting bytes, which takes a millisecond for some megabytes. The few that have too many
    brackets or commas are counted again without their strings.
    """
    if _items(body) <= bounds.items and _opened(body) <= bounds.depth:
        return
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 4 * bounds.items:  # two strings an item, key and value, of two quotes each
        raise TooComplex(f"more than {bounds.items:,} keys and values")
    bare = _STRINGS.sub(b"", bare)
    if _items(bare) > bounds.items:
        raise TooComplex(f"more than {bounds.items:,} keys and values")
    brackets = bare.translate(_BRACKETS, delete=_NO_BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > bounds.depth:
        raise TooComplex(f"lists and objects more than {bounds.depth} deep")


def _items(body: bytes) -> int:
    return body.count(b",") + _opened(body)


def _opened(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
