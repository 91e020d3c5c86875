"""The recipes' data is made once for all tests of the trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("VIGIL_CACHE")
    os.environ["VIGIL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["VIGIL_CACHE"]
    else:
        os.environ["VIGIL_CACHE"] = before
