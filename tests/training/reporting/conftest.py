"""Shared fixtures of the shipper's tests: a portal that takes reports, and an attempt that has some."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.intake import Server


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    folder = tmp_path / "job" / "attempt-1"
    (folder / "spool").mkdir(parents=True)
    (folder / "owner.json").write_text(json.dumps({"scheduler_id": "1", "restart_count": 0}))
    return folder
