"""Every planted failure and every harmless history on a real Slurm, with the rights that the docs tell sites to grant.

Agents' reports come in through their endpoint; what the workers do every few seconds is done in this process. Each case
has a database of its own, and returns its node.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nodes.schedulers.slurm.scheduler import Slurm
from portal.models import AuditEntry
from tests.nodes.remediation import planted
from tests.nodes.remediation.planted import FAILURES, HARMLESS, Plant, PlantedFailure
from tests.slurm.cluster import Cluster
from tests.slurm.fleet import SlurmFleet, configured_for_slurm, scheduler_of
from tests.slurm.people import PORTAL
from tests.waiting import until

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def scheduler(large: Cluster) -> Iterator[Slurm]:
    with scheduler_of(large) as found:
        yield found


@pytest.fixture
def fleet(large: Cluster, scheduler: Slurm, settings: Any) -> Iterator[SlurmFleet]:
    with configured_for_slurm(settings):
        slurm_fleet = SlurmFleet(large, scheduler)
        yield slurm_fleet
        slurm_fleet.restore()


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_failure_ends_in_one_finding_and_the_right_action(fleet: SlurmFleet, failure: PlantedFailure) -> None:
    failure.plant(fleet)
    planted.check_decision(fleet, failure, planted.check_finding(fleet, failure))


def test_a_mount_that_hangs_drains_once(fleet: SlurmFleet) -> None:
    planted.check_mount_that_hangs(fleet)
    assert fleet.drained_nodes() == {fleet.node: planted.MOUNT_HUNG}
    assert AuditEntry.objects.get().action == "drain"


def test_a_node_that_crashed_is_excluded(fleet: SlurmFleet) -> None:
    planted.check_crashed_node(fleet)
    state, reason = fleet.states()[fleet.node]
    assert ("DOWN" in state, reason) == (True, "Not responding")


@pytest.mark.parametrize("history", HARMLESS.values(), ids=HARMLESS)
def test_a_harmless_history_drains_nothing(fleet: SlurmFleet, history: Plant) -> None:
    history(fleet)
    planted.check_no_drain(fleet)


def test_without_the_right_to_drain_the_entry_names_what_to_grant(fleet: SlurmFleet) -> None:
    set_admin_level(fleet.slurm, "Operator")
    try:
        FAILURES["off the bus with an Xid"].plant(fleet)
        fleet.step()
        entry = fleet.entry()
        assert (entry.decision, fleet.drained_nodes()) == ("proposed", {})
        assert "Its order was refused: Slurm does not let vigil-portal change nodes" in entry.held_back
        assert f"sacctmgr modify user {PORTAL} set AdminLevel=Admin" in entry.held_back
    finally:
        set_admin_level(fleet.slurm, "Administrator")


def set_admin_level(slurm: Cluster, level: str) -> None:
    """Set the portal's level, and wait until slurmctld has it from slurmdbd."""
    slurm.run("sacctmgr", "-i", "modify", "user", "where", f"name={PORTAL}", "set", f"AdminLevel={level}")
    until(lambda: f"AdminLevel={level}" in slurm.run("scontrol", "show", "assoc_mgr", f"users={PORTAL}", "flags=users"))
