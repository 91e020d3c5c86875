"""Write and read Prometheus' text format (0.0.4). No Django.

Written for scrapers of Vigil; read from other people's exporters, without trust: lines that are not samples are
skipped, and nothing beyond the bounds is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_LINES, MAX_LINE_CHARS, MAX_LABELS = 100_000, 8_192, 64
_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
# Possessive quantifiers: a line of 8 KiB that is not a sample would otherwise be matched in millions of ways.
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*+)[ \t]*+(?:\{(.*)\})?[ \t]*+([^ \t{}]++)(?:[ \t]+-?\d+)?[ \t]*+")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|\Z)')
_BACKSLASHED = re.compile(r"\\(.)")

Labels = Mapping[str, str]
Value = float | int


@dataclass(frozen=True)
class Family:
    """A metric with all its samples. `labels` are the label names; each sample has their values in the same order."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...]
    samples: Iterable[tuple[tuple[str, ...], Value]]


@dataclass(frozen=True)
class Sample:
    """A sample in an exporter's response."""

    name: str
    labels: dict[str, str]
    value: float


def render(families: Iterable[Family]) -> str:
    """Return the text; a family without samples keeps its HELP and TYPE, so that its meaning can be looked up."""
    label_cache: dict[tuple[str, ...], dict[tuple[str, ...], str]] = {}  # many families are of the same things
    return "".join(piece for family in families for piece in _family(family, label_cache.setdefault(family.labels, {})))


def _family(family: Family, label_cache: dict[tuple[str, ...], str]) -> Iterator[str]:
    description = family.help.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {family.name} {description}\n# TYPE {family.name} {family.kind}\n"
    names = [f'{name}="' for name in family.labels]
    for values, value in family.samples:
        labels = label_cache.get(values)
        if labels is None:
            pairs = '",'.join([name + escaped(label) for name, label in zip(names, values, strict=True)])
            labels = label_cache[values] = f'{{{pairs}"}}' if names else ""
        yield f"{family.name}{labels} {_number(value)}\n"


def escaped(text: str) -> str:
    """Return a label's value, escaped."""
    plain = text.isalnum() or not ("\\" in text or '"' in text or "\n" in text)
    return text if plain else text.translate(_ESCAPED)


def _number(value: Value) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def samples(text: str) -> Iterator[Sample]:
    """Yield the samples in an exporter's response, in order."""
    for count, line in enumerate(text.split("\n")):
        if count >= MAX_LINES:
            return
        if not line or line[0] == "#" or len(line) > MAX_LINE_CHARS:
            continue
        if (found := _sample(line.rstrip("\r"))) is not None:
            yield found


def _sample(line: str) -> Sample | None:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        return None
    labels = _labels(match[2] or "")
    try:
        return None if labels is None else Sample(match[1], labels, float(match[3]))
    except ValueError:
        return None


def _labels(text: str) -> dict[str, str] | None:
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None or len(found) >= MAX_LABELS:
            return {} if not text.strip() else None
        found[match[1]] = _BACKSLASHED.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], match[2])
        at = match.end()
    return found
