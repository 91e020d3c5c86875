"""Report what a check of the site found: one line about the state, and one about the remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "error", "skip"]
_SENTENCE = re.compile(r"(?<=[.?!]) (?=[A-Z])")


@dataclass(frozen=True)
class CheckFinding:
    """A result of a check. `detail` has the observed value, never a token or a key. `skip`: it was not checked."""

    level: Level
    title: str
    detail: str
    remedy: str = ""


def ok(title: str, detail: str) -> CheckFinding:
    return CheckFinding("ok", title, detail)


def warn(title: str, detail: str, remedy: str) -> CheckFinding:
    return CheckFinding("warn", title, detail, remedy)


def failed(title: str, detail: str, remedy: str) -> CheckFinding:
    return CheckFinding("error", title, detail, remedy)


def skip(title: str, detail: str, remedy: str = "Fix the problems above, and check again.") -> CheckFinding:
    return CheckFinding("skip", title, detail, remedy)


def from_exception(title: str, exception: Exception, remedy: str = "") -> CheckFinding:
    """Return a finding for an error, whose text has what happened, then what to do."""
    text = str(exception) or type(exception).__name__
    first, *rest = _SENTENCE.split(text, maxsplit=1)
    return failed(title, first, remedy or " ".join(rest) or "See docs/how-to/slurm.md.")
