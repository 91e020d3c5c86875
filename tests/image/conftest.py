"""Fixtures for tests of built images: `make test-image` builds them and sets TEST_IMAGE; `make test` skips them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.image.build import TARGETS
from tests.image.site import Site
from tests.image.storage import mounted

collect_ignore_glob = [] if os.environ.get("TEST_IMAGE") else ["test_*.py"]


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    """Return one of the build targets of docker/Dockerfile."""
    return str(request.param)


@pytest.fixture(scope="session")
def root(target: str) -> Iterator[Path]:
    """Return the image's root folder."""
    with mounted(f"vigil:{target}") as root:
        yield root


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """Start the whole site of the compose file. It is shared: a test that stops a service starts it again."""
    with tempfile.TemporaryDirectory(prefix="vigil-image-") as folder:
        site = Site(Path(folder))
        try:
            site.start()
            yield site
        finally:
            print(site.output())
            site.close()


@pytest.fixture
def client(site: Site) -> Iterator[httpx.Client]:
    """Return the first sysadmin's client, which goes through the proxy."""
    with site.client() as client:
        yield client
