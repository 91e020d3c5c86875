"""These tests start whole Slurms: `make test-slurm` and `.ci/run` run them, `make test` leaves them out.

TEST_SLURM=1 runs each test on all releases, TEST_SLURM=24.11 on that one alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from tests.slurm.cluster import Cluster, cluster
from tests.slurm.portal import Person, Portal, portal_on
from tests.slurm.release import RELEASES

CHOSEN = os.environ.get("TEST_SLURM", "")
NAMES = [CHOSEN] if CHOSEN not in ("", "1") else [release.name for release in RELEASES]

SHARES = {
    "end to end": re.compile(r"/test_end_to_end\.py::"),
    "lives": re.compile(r"/test_(attach|planted|push)\.py::"),
}

collect_ignore_glob = [] if CHOSEN else ["test_*.py"]


class ByRelease(LoadScopeScheduling):  # type: ignore[misc]
    """Three shares of each release, a cluster for each: two of whole lives of jobs, which mostly wait, and all else."""

    def _split_scope(self, nodeid: str) -> str:
        parameters = re.split(r"[\[\]-]", nodeid)
        release = next((name for name in NAMES if name in parameters), nodeid)
        share = next((name for name, files in SHARES.items() if files.search(nodeid)), "all else")
        return f"{release} {share}"


# Instead of marks for `--dist loadgroup`: xdist 3.8 cannot tell them to its controller from pytest 9.2 on.
@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return ByRelease(config, log)


@pytest.fixture(scope="session", params=NAMES)
def release(request: pytest.FixtureRequest) -> str:
    """The release of Slurm that this test runs on."""
    return str(request.param)


@pytest.fixture(scope="session")
def slurm(release: str) -> Iterator[Cluster]:
    """A cluster of that release, up since its first test. Shared: leave it as it was (`slurm.without("slurmctld")`)."""
    with cluster(release) as made:
        yield made


@pytest.fixture(scope="module")
def portal(slurm: Cluster) -> Iterator[Portal]:
    """One portal for a module. Jobs of one test are no concern of another's."""
    with portal_on(slurm) as made:
        yield made


@pytest.fixture
def alice(portal: Portal) -> Iterator[Person]:
    """A researcher of the project vision, over REST."""
    person = portal.as_person("alice")
    yield person
    person.client.close()


@pytest.fixture
def bob(portal: Portal) -> Iterator[Person]:
    """Of the project speech."""
    person = portal.as_person("bob")
    yield person
    person.client.close()
