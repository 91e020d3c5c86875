from __future__ import annotations

import pytest

from tests.jobs.schedulers import ScriptedScheduler


@pytest.fixture
def scheduler() -> ScriptedScheduler:
    return ScriptedScheduler(has_arrays=True)
