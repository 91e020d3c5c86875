"""How far a run was by its own words: steps counted, the end announced. A line counts as a cause only if no step follows."""

from __future__ import annotations

import re
from dataclasses import dataclass

import re2

from jobs.postmortem.signatures import options

# Each with the step in `n`, and perhaps how many there are in `of`. One alternation, so that a block is read once.
_FORMS = (
    r"\biteration:? +(?P<n>\d{1,9})(?: */ *(?P<of>\d+))?",  # Megatron
    r"\b(?:global_?)?step(?:s)?(?:=| = |: ?| +|\] *|\[)(?P<n>\d{1,9})(?:(?: */ *| of )(?P<of>\d+))?\b",
    r"['\"](?:global_)?step['\"]: ?(?P<n>\d{1,9})",
    r"\b\d{1,3}%\|[^|\n]{0,200}\| *(?P<n>\d{1,9})/(?P<of>\d{1,9}) \[",  # tqdm
    r"\b[Ee]poch:? *\[?(?P<n>\d{1,6})\]?(?:(?:/| of )(?P<of>\d{1,6}))?\b[^\n]{0,80}(?:loss|it/s|%|acc|lr)",
    r"\bit(?:er)?(?:=|: ?|\[| )(?P<n>\d{1,9})\b",
    r"\bround:?[ =]*(?P<n>\d{1,6})\b[^\n]{0,60}(?:loss|acc)",
    r"\bbatch(?:=|: ?| )(?P<n>\d{1,9})(?:/(?P<of>\d+))?\b[^\n]{0,80}loss",
    r"\bupdate(?:s|_num)?['\"]?(?:=|: ?['\"]?| )(?P<n>\d{1,9})\b",  # fairseq
    r"(?P<n>\d{1,9})/(?P<of>\d{1,9}) \[\d+:\d\d(?::\d\d)?<",
    r"'loss': ?'?[\d.]+[^\n]{0,160}'epoch': ?'?(?P<n>\d{1,6}\.\d+)",  # Hugging Face's trainer
)
_SIEVE = re2.compile(b"|".join(b"(?:" + re.sub(r"\?P<\w+>", "?:", form).encode() + b")" for form in _FORMS), options())
_READ = [re.compile(form) for form in _FORMS]


@dataclass(frozen=True, slots=True)
class Mark:
    """One step that a line tells of."""

    line: int
    step: float
    of: int | None = None


def find(block: bytes, start: int = 0) -> list[int]:
    """Where in a block lines tell of steps: offsets, one a line."""
    found, at, end = [], start, len(block)
    while (hit := _SIEVE.search(block, at)) is not None:
        found.append(hit.start())
        at = block.find(b"\n", hit.end()) + 1
        if not at or at >= end:
            break
    return found


def read(line: int, text: str) -> Mark | None:
    """The step that one line tells of; of a progress bar drawn over and over, the last."""
    for form in _READ:
        last = None
        for last in form.finditer(text):  # noqa: B007
            pass
        if last is not None:
            told = last.groupdict()
            return Mark(line, float(told["n"]), int(told["of"]) if told.get("of") else None)
    return None
