"""These tests start whole Slurms: `make test-slurm` runs them, `make test` leaves them out.

TEST_SLURM=1 runs each test on both releases, TEST_SLURM=24.11 on that one alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, cluster
from tests.slurm.release import RELEASES

CHOSEN = os.environ.get("TEST_SLURM", "")
NAMES = [CHOSEN] if CHOSEN not in ("", "1") else [release.name for release in RELEASES]

collect_ignore_glob = [] if CHOSEN else ["test_*.py"]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs everything of a release: one cluster of each is ever up."""
    for item in items:
        if isinstance(item, pytest.Function) and "release" in getattr(getattr(item, "callspec", None), "params", {}):
            item.add_marker(pytest.mark.xdist_group(item.callspec.params["release"]))


@pytest.fixture(scope="session", params=NAMES)
def release(request: pytest.FixtureRequest) -> str:
    """The release of Slurm that this test runs on."""
    return str(request.param)


@pytest.fixture(scope="session")
def slurm(release: str) -> Iterator[Cluster]:
    """A cluster of that release, up since its first test. Shared: leave it as it was (`slurm.without("slurmctld")`)."""
    with cluster(release) as made:
        yield made
