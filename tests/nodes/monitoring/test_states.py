"""What rules observe of GPUs and nodes: slices, ports of few nodes, removed parts, Xids that a site's rule names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import pytest

from nodes.cluster import sync
from nodes.models import Agent, Gpu, HealthEntry, SiteRule
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
SITE_XID = """
[[rule]]
name = "own-xid"
title = "An Xid of this site's driver"
source = "a test"
severity = "info"
action = "ignore"
signal = "xid"
where = { code = 999 }
clears = "quiet"
clears_after = "1h"
example = [{ fires = true, steps = [{ code = 999 }] }, { fires = false, steps = [{ code = 13 }] }]
"""


def found(*rules: str) -> set[tuple[str, str]]:
    """Return the active findings of these rules: a busy machine's clock may be a finding, too."""
    return set(HealthEntry.objects.active().filter(rule__in=rules).values_list("node", "rule"))


def expect_gpus(lab: Lab, number: int) -> None:
    lab.scheduler.machines = [replace(machine, gpus=number) for machine in lab.scheduler.machines]
    sync.read(lab.scheduler)


def report_ports(ports: Mapping[str, Mapping[str, int]]) -> None:
    """Let these nodes report these InfiniBand ports as active (1) or not."""
    for node, states in ports.items():
        host = {f"ib_up:{port}": state for port, state in states.items()}
        Agent.objects.filter(node=node).update(newest={"host": host})


def cut_gpus(lab: Lab, *, mig: bool) -> None:
    """Let the first node's agent report its GPUs with MIG on or off."""
    machine = lab.machine()
    facts = machine.facts(time.time())
    facts["events"][0]["gpus"] = [{**gpu, "mig": mig} for gpu in facts["events"][0]["gpus"]]
    assert machine.post(facts).status_code == 200


def test_slices_of_gpus_are_not_missing_gpus() -> None:
    lab = Lab()
    lab.machine()
    expect_gpus(lab, 14)
    cut_gpus(lab, mig=True)
    lab.later(2)
    assert found("gpus-missing", "off-bus") == set()
    cut_gpus(lab, mig=False)
    lab.later(4)
    assert found("gpus-missing", "off-bus") == {("dgx-01", "gpus-missing")}


def test_a_port_that_is_down_on_only_one_of_two_nodes_is_a_finding() -> None:
    lab = Lab()
    for node in ("dgx-01", "dgx-02"):
        lab.machine(node)
    report_ports({"dgx-01": {"mlx5_0": 0}, "dgx-02": {"mlx5_0": 1}})
    lab.later(2)
    assert found("port-down") == {("dgx-01", "port-down")}


def test_findings_about_what_was_removed_end() -> None:
    lab = Lab()
    broken, _ = lab.machine("dgx-01"), lab.machine("dgx-02")
    now = time.time()
    mounts = [{"mount": "/old", "source": "server:/old"}]
    broken.post(broken.facts(now, mounts=mounts), broken.event("mount.slow", now, mount="/old", problem="no answer"))
    Gpu.objects.filter(uuid=broken.gpus[0]).update(counters={"remapped_pending": 1})
    report_ports({"dgx-01": {"mlx5_0": 0, "mlx5_1": 1}, "dgx-02": {"mlx5_0": 1, "mlx5_1": 1}})
    lab.later(2)
    rules = "file-system-slow", "row-remap-pending", "port-down"
    assert found(*rules) == {("dgx-01", rule) for rule in rules}

    broken.gpus = broken.gpus[1], broken.gpus[0]  # in other slots: they are still there
    broken.post(broken.facts(now))  # it does not say what is mounted
    report_ports({"dgx-01": {"mlx5_1": 1}})  # its neighbour still has the port: the adapter may have failed
    lab.later(14)
    assert found(*rules) == {("dgx-01", rule) for rule in rules}

    broken.gpus = broken.gpus[0], "GPU-new"
    broken.post(broken.facts(now, mounts=[]))
    report_ports({"dgx-01": {"ib0": 1, "ib1": 1}, "dgx-02": {"ib0": 1, "ib1": 1}})
    lab.later(15)
    assert found(*rules) == {("dgx-01", "file-system-slow"), ("dgx-01", "port-down")}, "those end after clears_after"
    expect_gpus(lab, 3)
    lab.later(28)
    assert found(*rules) == set()
    assert found("gpus-missing", "off-bus") == {("dgx-01", "gpus-missing"), ("dgx-02", "gpus-missing")}


def test_an_xid_is_unknown_until_a_rule_of_the_site_names_it() -> None:
    lab = Lab()
    lab.xid(999)
    lab.step()
    assert found("own-xid", "unknown-xid") == {("dgx-01", "unknown-xid")}
    SiteRule.objects.create(name="own-xid", toml=SITE_XID)
    lab.xid(999, "dgx-02")
    lab.step()
    assert found("own-xid", "unknown-xid") == {("dgx-01", "unknown-xid"), ("dgx-02", "own-xid")}


def test_the_agents_of_nodes_that_were_taken_away_are_not_silent_for_ever() -> None:
    lab = Lab()
    for node in lab.names:
        lab.machine(node)
    away = lab.names[8:]
    lab.later(20, silent=away)
    assert found("agents-silent") == {("", "agents-silent")}
    lab.scheduler.machines = [machine for machine in lab.scheduler.machines if machine.name not in away]
    sync.read(lab.scheduler)
    lab.later(60 * 24 * 8, silent=away, is_watched=False)
    lab.later(60 * 24 * 8 + 30, silent=away)
    assert found("agents-silent", "agent-silent", "node-unreachable") == set()
