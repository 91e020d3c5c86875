"""Conditions of health rules on the fields of an observation, as they are written in TOML.

code = 79                    equal; texts are compared without regard to case
code = [48, 95]              one of these
margin_c = "<= 3"            compared with a number: <, <=, >, >= or !=
throttle = "has 0x40"        a bit mask that has any of these bits
text = "contains fatal"      a text with these words
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FieldValue = bool | int | float | str | None
"""None: unknown, which fulfils no condition."""

MAX_TEXT = 200
LARGEST = 2**63
"""Integers of TOML are smaller; Python's parser takes longer ones, which no float can hold."""
MAX_CHOICES = 100
_COMPARED = re.compile(r"\s*(<=|>=|!=|<|>)\s*(-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*")
_BITS = re.compile(r"\s*has\s+(0x[0-9a-fA-F]{1,16}|\d{1,19})\s*")
_WORDS = re.compile(r"\s*contains\s+(\S.*?)\s*")
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "!=": operator.ne,
}  # fmt: skip


class BadCondition(ValueError):
    """Raised for a condition that cannot be read; the message tells its author why."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on one field; `text` is how it was written."""

    text: str
    operator: str
    operand: float | int | str | tuple[FieldValue, ...]

    def holds(self, value: FieldValue) -> bool:
        """Return whether the value fulfils the condition; an unknown one and one of another type do not."""
        if value is None:
            return False
        if self.operator == "in":
            return any(_is_equal(value, choice) for choice in _choices(self.operand))
        if self.operator == "contains":
            return isinstance(value, str) and str(self.operand).casefold() in value.casefold()
        if isinstance(value, str) or isinstance(value, float) and not math.isfinite(value):
            return False
        if self.operator == "has":
            return bool(int(value) & int(self.operand))  # type: ignore[arg-type]
        return _OPERATORS[self.operator](float(value), float(self.operand))  # type: ignore[arg-type]


def parse_condition(value: object) -> Condition:
    """Return the condition that a TOML value writes. Raises BadCondition."""
    if isinstance(value, list):
        if not value or len(value) > MAX_CHOICES:
            raise BadCondition(f"a list must have 1 to {MAX_CHOICES} values")
        return Condition(_written(value), "in", tuple(_scalar(choice) for choice in value))
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise BadCondition(f"text must be at most {MAX_TEXT} characters")
        if found := _COMPARED.fullmatch(value):
            return _comparison(value, found[1], float(found[2]))
        if found := _BITS.fullmatch(value):
            return Condition(value, "has", int(found[1], 0) & 0xFFFF_FFFF_FFFF_FFFF)
        if found := _WORDS.fullmatch(value):
            return Condition(value, "contains", found[1])
        if value.lstrip().startswith(("<", ">", "=", "!")):
            raise BadCondition(f'{value!r:.40} is no comparison: write a number after <, <=, >, >= or !=, as in "<= 3"')
    return Condition(_written(value), "in", (_scalar(value),))


def _comparison(text: str, sign: str, number: float) -> Condition:
    if not math.isfinite(number):
        raise BadCondition(f"{text!r:.40} compares with a number that is too large")
    return Condition(text, sign, number)


def _scalar(value: object) -> FieldValue:
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise BadCondition(f"text must be at most {MAX_TEXT} characters")
    if isinstance(value, bool | str) or is_number(value):
        return value  # type: ignore[return-value]
    raise BadCondition(f"{value!r:.40} is not a number, a text, or true or false")


def is_number(value: object) -> bool:
    """Return whether this is a number that observations may have: finite, and of at most 64 bits if it is whole."""
    if isinstance(value, int):
        return -LARGEST <= value < LARGEST
    return isinstance(value, float) and math.isfinite(value)


def _choices(operand: Any) -> tuple[FieldValue, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


def _is_equal(value: FieldValue, choice: FieldValue) -> bool:
    if isinstance(value, str) and isinstance(choice, str):
        return value.casefold() == choice.casefold()
    # In Python True == 1: a rule that asks for code 1 must not fire on a flag.
    return isinstance(value, bool) == isinstance(choice, bool) and value == choice


def _written(value: object) -> str:
    return str(value).replace("True", "true").replace("False", "false")
