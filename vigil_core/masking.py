"""Mask secrets in text that is shown elsewhere than where it was written: tokens, passwords and keys become dots.

The forms are data (secrets.toml). A form is tried only on a text that has one of its words, as gitleaks does, so that a
text without a secret costs microseconds; RE2 matches it, so that no text can make masking slow.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import re2

DOTS = "•••"
_SECRETS = Path(__file__).with_name("secrets.toml")


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form that secrets have. The fields are described at the top of secrets.toml."""

    name: str
    words: tuple[str, ...]
    source: str
    pattern: str
    example: str
    harmless: str
    unless: str = ""

    def may_be_in(self, lower: str) -> bool:
        """Return whether a lower-case text has a word that every match contains."""
        return any(word in lower for word in self.words)

    def mask(self, text: str) -> str:
        """Return the text with every match of this form masked."""
        return str(self._pattern.sub(self._masked, text))

    @cached_property
    def _pattern(self) -> Any:
        return re2.compile(self.pattern)

    @cached_property
    def _is_harmless(self) -> Callable[[str], Any]:
        return re2.compile(self.unless).fullmatch if self.unless else lambda secret: None

    def _masked(self, found: Any) -> str:
        groups = (number for number in range(1, len(found.groups()) + 1) if found.start(number) >= 0)
        start, end = found.span(next(groups, 0))
        if self._is_harmless(found.string[start:end]):
            return str(found[0])
        return f"{found.string[found.start() : start]}{DOTS}{found.string[end : found.end()]}"


@cache
def forms() -> tuple[Form, ...]:
    """Return all known forms of secrets, in the order in which they are masked."""
    raw = tomllib.loads(_SECRETS.read_text(encoding="utf-8"))["form"]
    return tuple(Form(**{**form, "words": tuple(form["words"])}) for form in raw)


def masked(text: str) -> str:
    """Return the text with everything that looks like a secret replaced by dots."""
    lower = text.lower()
    for form in forms():
        if form.may_be_in(lower):
            text = form.mask(text)
    return text
