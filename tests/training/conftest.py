"""Shared fixtures of the trainer's tests: the recipes' data, made once, and a run directory to launch in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.launching import Run


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("VIGIL_CACHE")
    os.environ["VIGIL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["VIGIL_CACHE"]
    else:
        os.environ["VIGIL_CACHE"] = before


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Return a run directory; everything launched in it ends with the test."""
    run = Run(tmp_path / "run")
    yield run
    run.end()
