"""Fixtures for tests with a complete Slurm: `make test-slurm` and `.ci/run` run them, `make test` leaves them out.

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
    """Split each release into three shares with a cluster each: two of whole jobs, which mostly wait, and the rest."""

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
    """Return the Slurm release on which this test runs."""
    return str(request.param)


@pytest.fixture(scope="session")
def slurm(release: str) -> Iterator[Cluster]:
    """Return a running cluster of that release. It is shared: leave it as it was (`slurm.without("slurmctld")`)."""
    with cluster(release) as created:
        yield created


@pytest.fixture(scope="session")
def large(release: str) -> Iterator[Cluster]:
    """Return a cluster of twelve nodes with 2 GPUs each, but 1 on dgx10 and none on the last two.

    Two of its nodes may be out of service before Vigil stops: return those that a test drains.
    """
    with cluster(release, nodes=12, gpus=2, gpus_of_last=(1, 0, 0)) as created:
        yield created


@pytest.fixture(scope="module")
def portal(slurm: Cluster) -> Iterator[Portal]:
    """Return one portal per module. A test must ignore the jobs of other tests."""
    with portal_on(slurm) as created:
        yield created


@pytest.fixture
def alice(portal: Portal) -> Iterator[Person]:
    """Return a researcher of the project vision, as a REST client."""
    person = portal.as_person("alice")
    yield person
    person.client.close()


@pytest.fixture
def bob(portal: Portal) -> Iterator[Person]:
    """Return a researcher of the project speech, as a REST client."""
    person = portal.as_person("bob")
    yield person
    person.client.close()
