"""Test that only the settings and nodes/schedulers compare the scheduler's name; others query its capabilities."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nodes.schedulers import choose
from nodes.schedulers.base import SchedulerError

ROOT = Path(__file__).resolve().parents[2]
COMPARISON = re.compile(r"(?:VIGIL_SCHEDULER|scheduler_name)\s*[!=]=|[!=]=\s*(?:\w+\.)*VIGIL_SCHEDULER\b")


def test_no_code_compares_the_name() -> None:
    found = [
        str(path.relative_to(ROOT))
        for package in ("console", "jobs", "nodes", "portal", "vigil_cli")
        for path in (ROOT / package).rglob("*.py")
        if not path.is_relative_to(ROOT / "nodes/schedulers") and COMPARISON.search(path.read_text())
    ]
    assert not found, "use nodes.schedulers.choose.capabilities_of"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SchedulerError, match="carrier-pigeon is not supported"):
        choose.capabilities_of("carrier-pigeon")
