"""What a program was doing when it raised: told by the frames of its traceback, from the innermost outwards.

operations.toml has them, in the order in which they are tried for each frame.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from diagnosis.logs.tracebacks import Frame


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that programs do: by a frame's function, its path (as "path:function"), or its line of code."""

    name: str
    about: str
    functions: re.Pattern[str] | None
    paths: re.Pattern[str] | None
    code: re.Pattern[str] | None

    def fits(self, frame: Frame) -> bool:
        return bool(
            (self.functions and self.functions.fullmatch(frame.function))
            or (self.paths and self.paths.search(f"{frame.path}:{frame.function}"))
            or (self.code and frame.code and self.code.search(frame.code))
        )


@cache
def operations() -> tuple[Operation, ...]:
    told = tomllib.loads(Path(__file__).with_name("operations.toml").read_text(encoding="utf-8"))
    keys = ("functions", "paths", "code")
    return tuple(
        Operation(one["name"], one["about"], *(_any_of(one.get(key, ())) for key in keys)) for one in told["operation"]
    )


def _any_of(patterns: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


def operations_of(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Everything that was being done, the innermost first: reading data in an import is both."""
    found: dict[str, None] = {}
    for frame in reversed(frames):
        for operation in operations():
            if operation.fits(frame):
                found.setdefault(operation.name)
    return tuple(found)
