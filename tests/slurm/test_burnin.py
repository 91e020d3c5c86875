"""Test burn-ins on a real Slurm: reserved, then undrained, tested inside; what failed is drained before others come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from jobs.burnins.start import NeedsAgreement, cancel, start
from jobs.following import follow
from nodes.burnin import plan
from nodes.models import BurnIn, HealthEntry, NodeOrder
from nodes.schedulers.slurm.scheduler import Slurm
from portal.models import User
from tests.lab import sysadmin
from tests.nodes.telemetry.reporting import Machine
from tests.slurm.cluster import Cluster
from tests.slurm.fleet import SlurmFleet, configured_for_slurm, scheduler_of
from tests.waiting import until

pytestmark = pytest.mark.django_db
REASON = "fan 3"
TWO_GPUS, SINGLE_GPU, NO_GPU = "dgx09", "dgx10", "dgx11"
"""The private cluster's GPUs are device files of terminals, which torch cannot find: only a node without any passes."""


@pytest.fixture(scope="module")
def scheduler(large: Cluster) -> Iterator[Slurm]:
    with scheduler_of(large) as found:
        yield found


class SlurmBurnIn:
    """One burn-in, advanced by ticks of the follower."""

    def __init__(self, fleet: SlurmFleet, user: User) -> None:
        self.fleet, self.user, self.burn_in = fleet, user, BurnIn()

    def start(self, *nodes: str, seconds: int = 60, **options: Any) -> BurnIn:
        self.burn_in = start(self.user, nodes, seconds, **options)
        return self.burn_in

    def until(self, condition: Callable[[BurnIn], object], seconds: float = 240) -> BurnIn:
        def tick() -> bool:
            BurnIn.objects.exclude(state="running").update(tried_at=None)
            follow.tick(self.fleet.scheduler)
            self.burn_in.refresh_from_db()
            return bool(condition(self.burn_in))

        until(tick, seconds=seconds)
        return self.burn_in

    def until_tested(self, node: str) -> None:
        """Wait until the node has reported a test's result."""

        def is_tested(row: BurnIn) -> bool:
            assert row.state != "ended", (row.problem, row.log)
            return row.nodes.get(node=node).tests.exists()

        self.until(is_tested)

    def until_ended(self) -> None:
        self.until(lambda row: row.state == "ended")

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Return the processes of its job by Slurm's name of the node."""
        assert self.fleet.slurm.room is not None
        found: dict[str, list[psutil.Process]] = {}
        # Only of this cluster: others that run at the same time have the same numbers of jobs.
        for pid in self.fleet.slurm.room.members():
            try:
                process = psutil.Process(pid)
                environment = process.environ()
            except psutil.Error:
                continue
            if environment.get("SLURM_JOB_ID") == self.burn_in.scheduler_id and "SLURMD_NODENAME" in environment:
                found.setdefault(environment["SLURMD_NODENAME"], []).append(process)
        return found


@pytest.fixture
def bench(large: Cluster, scheduler: Slurm, settings: Any) -> Iterator[SlurmBurnIn]:
    with configured_for_slurm(settings):
        fleet = SlurmFleet(large, scheduler)
        yield SlurmBurnIn(fleet, sysadmin("ops"))
        fleet.restore()


def drain_by_rule(fleet: SlurmFleet, node: str) -> HealthEntry:
    """Let a health rule drain the node: a GPU that neither its agent nor Slurm lists any more has failed."""
    machine = fleet.machines[node] = Machine(node=node, gpus=())
    assert machine.post(machine.facts(time.time())).status_code == 200
    fleet.happens("xid", node, xid=79, seq=1, text="GPU has fallen off the bus.")
    fleet.step()
    assert fleet.drained_nodes() == {node: "[node] Xid 79 (vigil: off-bus)"}
    return fleet.entry("off-bus", node)


def test_a_drained_node_is_tested_inside_a_reservation(bench: SlurmBurnIn) -> None:
    fleet, node = bench.fleet, bench.fleet.node
    fleet.slurm.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={REASON}")
    fleet.step()
    with pytest.raises(NeedsAgreement, match=REASON):
        bench.start(node)
    burn_in = bench.start(node, may_undrain=True)
    bench.until_tested(node)
    shown = fleet.slurm.run("scontrol", "show", "reservation", burn_in.reservation)
    assert f"Nodes={node} " in shown
    assert "MAINT" in shown
    assert "IGNORE_JOBS" in shown
    assert f"Reservation={burn_in.reservation}" in fleet.slurm.run("scontrol", "show", "job", burn_in.scheduler_id)
    cancel(bench.user, burn_in)
    bench.until_ended()
    assert burn_in.reservation not in fleet.slurm.run("scontrol", "show", "reservation")
    row = burn_in.nodes.get()
    assert (row.verdict, row.outcome) == ("failed", "Drained.")
    assert row.findings[0]["text"] == "Found 0 of 2 GPUs."
    assert fleet.drained_nodes() == {node: "[node] Found 0 of 2 GPUs (vigil: burn-in)"}


def test_a_node_that_a_rule_drained_passes_and_returns(bench: SlurmBurnIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_SECONDS", 1)  # one short cycle of every test
    entry = drain_by_rule(bench.fleet, NO_GPU)
    burn_in = bench.start(NO_GPU, seconds=1)
    bench.until_ended()
    row = burn_in.nodes.get()
    assert (row.verdict, row.outcome) == ("passed", "In service."), (row.findings, burn_in.problem, burn_in.log)
    assert {test.test for test in row.tests.all()} >= {"memory", "matrix", "all-reduce", "mount", "disk"}
    entry.refresh_from_db()
    assert (entry.state, entry.decision_reason) == ("cleared", f"Burn-in {burn_in.pk} passed.")
    assert bench.fleet.drained_nodes() == {}
    assert burn_in.reservation not in bench.fleet.slurm.run("scontrol", "show", "reservation")
    bench.fleet.step()
    orders = NodeOrder.objects.order_by("id").values_list("action", "state", "rule")
    assert list(orders) == [("drain", "done", "off-bus"), ("undrain", "done", "burn-in")]
    until(lambda: bench.fleet.slurm.idle() == len(bench.fleet.names))


def test_nodes_with_different_numbers_of_gpus_test_all_of_them(bench: SlurmBurnIn) -> None:
    nodes = (TWO_GPUS, SINGLE_GPU, NO_GPU)
    bench.start(*nodes)
    if bench.fleet.slurm.release.name == "22.05":
        bench.until_ended()
        assert "Slurm 22.05 cannot test nodes with different numbers of GPUs together" in bench.burn_in.log
        assert set(bench.burn_in.nodes.values_list("verdict", "outcome")) == {("inconclusive", "In service.")}
        return
    visible: dict[str, str] = {}

    def all_have_started(row: BurnIn) -> bool:
        for node, processes in bench.processes().items():
            for process in processes:
                try:
                    if process.cmdline()[1:4] == ["-P", "-m", "training.burnin"]:  # not srun, which names it, too
                        visible[node] = process.environ().get("CUDA_VISIBLE_DEVICES", "")
                except psutil.Error:
                    continue
        assert row.state != "ended", (row.problem, row.log)
        return visible.keys() == set(nodes)

    bench.until(all_have_started)
    assert (visible[TWO_GPUS], visible[SINGLE_GPU]) == ("0,1", "0")
    assert not any(letter.isdecimal() for letter in visible[NO_GPU])
    cancel(bench.user, bench.burn_in)
    bench.until_ended()


def test_a_node_that_dies_in_it_is_reported_and_stays_drained(bench: SlurmBurnIn) -> None:
    slurm = bench.fleet.slurm
    entry = drain_by_rule(bench.fleet, NO_GPU)
    burn_in = bench.start(NO_GPU)
    bench.until_tested(NO_GPU)
    slurm.kill(NO_GPU)
    try:
        for process in bench.processes()[NO_GPU]:
            process.kill()
        bench.until_ended()
        row = burn_in.nodes.get()
        assert (row.verdict, row.outcome) == ("failed", "Drained."), (row.findings, burn_in.problem)
        assert row.findings[0]["text"] == "The node failed during the burn-in."
        assert burn_in.reservation not in slurm.run("scontrol", "show", "reservation")
    finally:
        slurm.start(NO_GPU)
    until(slurm.is_well)
    assert bench.fleet.drained_nodes() == {NO_GPU: "[node] The node failed during the burn-in (vigil: burn-in)"}
    bench.fleet.step()
    assert bench.fleet.drained_nodes().keys() == {NO_GPU}, "nothing undrains it"
    entry.refresh_from_db()
    assert entry.state == "open"
