from __future__ import annotations

import pytest

from tests.jobs.schedulers import Told


@pytest.fixture
def told() -> Told:
    return Told(has_arrays=True)
