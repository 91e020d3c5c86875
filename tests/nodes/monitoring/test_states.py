"""What rules observe of GPUs and nodes: slices, ports of few nodes, and Xids that a site's own rule names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodes.cluster import sync
from nodes.models import Agent, Gpu, HealthEntry, SiteRule
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db
OWN_XID = """
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


def test_slices_of_gpus_are_not_missing_gpus() -> None:
    lab = Lab()
    lab.machine()
    expect_gpus(lab, 14)
    Gpu.objects.update(facts={"mig": True})
    lab.later(2)
    assert found("gpus-missing", "off-bus") == set()
    Gpu.objects.update(facts={"mig": False})
    lab.later(4)
    assert found("gpus-missing", "off-bus") == {("dgx-01", "gpus-missing")}


def test_one_port_that_is_down_on_one_of_two_nodes_is_a_finding() -> None:
    lab = Lab()
    for node, is_up in (("dgx-01", 0), ("dgx-02", 1)):
        lab.machine(node)
        Agent.objects.filter(node=node).update(newest={"host": {"ib_up:mlx5_0": is_up}})
    lab.later(2)
    assert found("port-down") == {("dgx-01", "port-down")}


def test_an_xid_is_unknown_until_a_rule_of_the_site_names_it() -> None:
    lab = Lab()
    lab.xid(999)
    lab.step()
    assert found("own-xid", "unknown-xid") == {("dgx-01", "unknown-xid")}
    SiteRule.objects.create(name="own-xid", toml=OWN_XID)
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
