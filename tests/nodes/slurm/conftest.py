from __future__ import annotations

import random

import pytest


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without delay."""
    monkeypatch.setattr(random, "uniform", lambda low, high: 0.0)
