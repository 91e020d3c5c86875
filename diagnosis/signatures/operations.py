"""Recognize what a program was doing when it raised, from the frames of its traceback.

operations.toml lists the operations, in the order in which they are tried for each frame.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from diagnosis.logs.tracebacks import StackFrame


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that programs do, recognized by a frame's function, its path ("path:function") or its line of code."""

    name: str
    about: str
    functions: re.Pattern[str] | None
    paths: re.Pattern[str] | None
    code: re.Pattern[str] | None

    def matches(self, frame: StackFrame) -> bool:
        return bool(
            (self.functions and self.functions.fullmatch(frame.function))
            or (self.paths and self.paths.search(f"{frame.path}:{frame.function}"))
            or (self.code and frame.code and self.code.search(frame.code))
        )


@cache
def operations() -> tuple[Operation, ...]:
    """Return all operations of operations.toml."""
    document = tomllib.loads(Path(__file__).with_name("operations.toml").read_text(encoding="utf-8"))
    keys = ("functions", "paths", "code")
    return tuple(
        Operation(table["name"], table["about"], *(_alternation(table.get(key, ())) for key in keys))
        for table in document["operation"]
    )


def _alternation(patterns: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


def operations_of(frames: Sequence[StackFrame]) -> tuple[str, ...]:
    """Return all operations of a stack, innermost first: reading data within an import is both."""
    found: dict[str, None] = {}
    for frame in reversed(frames):
        for operation in operations():
            if operation.matches(frame):
                found.setdefault(operation.name)
    return tuple(found)
