"""What a check of the site found: one line of what was seen, and one of what to do where that is not well."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "error", "skip"]
_SENTENCE = re.compile(r"(?<=[.?!]) (?=[A-Z])")


@dataclass(frozen=True)
class Finding:
    """`detail` has the value that was seen, never a token or a key. `skip`: it could not be looked at."""

    level: Level
    title: str
    detail: str
    remedy: str = ""


def ok(title: str, detail: str) -> Finding:
    return Finding("ok", title, detail)


def warn(title: str, detail: str, remedy: str) -> Finding:
    return Finding("warn", title, detail, remedy)


def bad(title: str, detail: str, remedy: str) -> Finding:
    return Finding("error", title, detail, remedy)


def skip(title: str, detail: str, remedy: str = "Mend what is said above, and check again.") -> Finding:
    return Finding("skip", title, detail, remedy)


def of_error(title: str, error: Exception, remedy: str = "") -> Finding:
    """Our errors say what happened, then what to do."""
    said = str(error) or type(error).__name__
    first, *rest = _SENTENCE.split(said, maxsplit=1)
    return bad(title, first, remedy or " ".join(rest) or "See docs/slurm.md.")
