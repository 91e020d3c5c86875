"""Read how far a run got from its log: steps, and the loss at each. A failure that steps follow was survived."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import re2

from diagnosis.regex import options

# Each with the step in `n`, and perhaps how many there are in `of`. One alternation, so that a block is read once.
_FORMS = (
    r"\biteration:? +#?(?P<n>\d{1,9})(?: */ *(?P<of>\d+))?",  # Megatron
    r"\b(?:global_?)?step(?:s)?(?:=| = |: ?| +|\] *|\[)(?P<n>\d{1,9})(?:(?: */ *| of )(?P<of>\d+))?\b",
    r"['\"](?:global_)?step['\"]: ?(?P<n>\d{1,9})",
    r"\b\d{1,3}%\|[^|\n]{0,200}\| *(?P<n>\d{1,9})/(?P<of>\d{1,9}) \[",  # tqdm
    r"\b(?P<n>\d{1,7})/(?P<of>\d{1,7}) [━=╸\[>. -]{3,}[^\n]{0,40}(?:s/step|ms/step|loss)",  # Keras
    r"\b[Ee]poch:? *\[?(?P<n>\d{1,6})\]?(?:(?:/| of )(?P<of>\d{1,6}))?\b[^\n]{0,80}(?:loss|it/s|%|acc|lr)",
    r"\bit(?:er)?(?:=|: ?|\[| )(?P<n>\d{1,9})\b",
    r"\bround:?[ =]*(?P<n>\d{1,6})\b[^\n]{0,60}(?:loss|acc)",
    r"\bbatch(?:=|: ?| )(?P<n>\d{1,9})(?:/(?P<of>\d+))?\b[^\n]{0,80}loss",
    r"\bupdate(?:s|_num)?['\"]?(?:=|: ?['\"]?| )(?P<n>\d{1,9})\b",  # fairseq
    r"(?P<n>\d{1,9})/(?P<of>\d{1,9}) \[\d+:\d\d(?::\d\d)?<",
    r"'loss': ?'?[\d.naif]+[^\n]{0,160}'epoch': ?'?(?P<n>\d{1,6}\.\d+)",  # Hugging Face's trainer
)
_SIEVE = re2.compile(b"|".join(b"(?:" + re.sub(r"\?P<\w+>", "?:", form).encode() + b")" for form in _FORMS), options())
_READ = [re.compile(form.replace(r"\b(?:global_?)?step", r"(?<!job )\b(?:global_?)?step", 1)) for form in _FORMS]
_LOSS = re.compile(
    r"(?i)\b(?:lm |train(?:ing)?[_ /]|total[_ ])?loss['\"]?(?: *[=:] *| +|\s*\|\s*)['\"]?"
    r"(?P<loss>[-+]?(?:nan|inf(?:inity)?|\d+\.?\d*(?:e[-+]?\d+)?))"
)
MIN_RISE = 3.0  # times what it had been, from which on a loss has run away
MIN_MARKS = 6  # marks with a loss, to say anything of its course
CLIMB_MARKS = 3  # marks of a rise, for it not to be one bad step


@dataclass(frozen=True, slots=True)
class StepMark:
    """One step that a line reports, with the total and the loss if it names them."""

    line: int
    step: float
    total: int | None = None
    loss: float | None = None


def find_steps(block: bytes, start: int = 0) -> list[int]:
    """Return the offsets in a block at which lines report steps, one per line."""
    found, at, end = [], start, len(block)
    while (hit := _SIEVE.search(block, at)) is not None:
        found.append(hit.start())
        at = block.find(b"\n", hit.end()) + 1
        if not at or at >= end:
            break
    return found


def parse_step(line: int, text: str) -> StepMark | None:
    """Return the step that one line reports, or None; the last one of a progress bar that was redrawn."""
    if _SIEVE.search(text.encode()) is None:
        return None
    for form in _READ:
        last = None
        for last in form.finditer(text):  # noqa: B007
            pass
        if last is not None:
            groups = last.groupdict()
            loss = _LOSS.search(text)
            value = float(loss["loss"]) if loss else None
            return StepMark(line, float(groups["n"]), int(groups["of"]) if groups.get("of") else None, value)
    return None


@dataclass(frozen=True, slots=True)
class LossOutcome:
    """What became of the loss from a line on: `kind` is "nan" (at once) or "divergence" (it climbed first)."""

    kind: str
    line: int
    text: str


def loss_outcome(marks: Sequence[StepMark]) -> LossOutcome | None:
    """Return how the loss went wrong by the end: not finite to the last, or far above its earlier level.

    None if it did not.
    """
    with_loss = [mark for mark in marks if mark.loss is not None]
    finite = [mark for mark in with_loss if mark.loss is not None and math.isfinite(mark.loss)]
    if len(with_loss) < 2 or not finite:
        return None
    bad = len(with_loss) - 1
    while bad >= 0 and not math.isfinite(with_loss[bad].loss or 0.0):
        bad -= 1
    ended_bad = with_loss[bad + 1 :]
    before = with_loss[: bad + 1]
    climb = has_climbed([mark.loss or 0.0 for mark in before if math.isfinite(mark.loss or 0.0)])
    if ended_bad:
        first = ended_bad[0]
        if climb:
            return LossOutcome(
                "divergence", first.line, f"the loss climbed to {before[-1].loss:g} before it was not a number"
            )
        return LossOutcome("nan", first.line, f"the loss was not a number from step {first.step:g} on")
    if climb and len(before) >= MIN_MARKS:
        last = before[-1]
        return LossOutcome("divergence", last.line, f"the loss climbed to {last.loss:g} by step {last.step:g}")
    return None


def has_climbed(losses: Sequence[float]) -> bool:
    """Return whether the last losses are far above the lowest, and not by a single step.

    The last `CLIMB_MARKS` must be above `MIN_RISE` times the minimum and 1.5 times the median of the first half.
    """
    if len(losses) < MIN_MARKS:
        return False
    low = min(losses)
    spread = sorted(losses[: max(MIN_MARKS, len(losses) // 2)])
    usual = spread[len(spread) // 2]
    tail = losses[-CLIMB_MARKS:]
    return all(value > MIN_RISE * max(low, 1e-3) and value > 1.5 * usual for value in tail)
