"""Write results as they are made, one line of JSON each, so that a crash keeps what was found before it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_TEXT = 300
PASSED, FAILED = "passed", "failed"
ABSENT = "absent"
"""The other node did not join; this says nothing about the node that reports it."""
MAX_LINE = 8_192
_output = 1  # where `emit` prints: stdout, or the copy that only `emit` knows


def result(
    test: str,
    item: str,
    *,
    outcome: str = PASSED,
    value: float | None = None,
    unit: str = "",
    digest: str = "",
    basis: str = "",
    detail: str = "",
) -> dict[str, Any]:
    """Return one result. `basis`: digests of equal basis must be equal, and values alike, on all devices."""
    return {
        "at": round(time.time(), 3), "test": test, "item": item[:MAX_TEXT], "outcome": outcome,
        "value": None if value is None else float(f"{value:.5g}"), "unit": unit, "digest": digest,
        "basis": basis[:MAX_TEXT], "detail": detail[:MAX_TEXT],
    }  # fmt: skip


def outcome_of(is_right: bool) -> str:
    return PASSED if is_right else FAILED


def reserve_stdout() -> None:
    """Leave stdout to `emit`: what libraries print goes to stderr, so that no half line of theirs precedes a result."""
    global _output
    _output = os.dup(1)
    os.dup2(2, 1)


def emit(line: Mapping[str, Any]) -> None:
    """Print a line for the node's main process."""
    os.write(_output, (json.dumps(line) + "\n").encode())


class ResultFile:
    """The results of one node, appended line by line and written through to the file system."""

    def __init__(self, run: Path, node: str) -> None:
        folder = run / "job" / "results"
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(
            folder / f"{node}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o660
        )

    def write(self, line: Mapping[str, Any]) -> None:
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
