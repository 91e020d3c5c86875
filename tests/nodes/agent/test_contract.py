"""Test that the portal's parser accepts what the agent sends."""

from __future__ import annotations

import json

import pytest

from nodes.agent.gpus.samples import COLUMNS
from nodes.agent.reporting.posting import BATCHES, COMPRESSED_BYTES, EVENTS
from nodes.telemetry import wire
from nodes.telemetry.fields import GPU_FIELDS
from tests.nodes.agent.running import Running
from tests.nvml import StandIn, uuid
from tests.waiting import until

LIMITS = (BATCHES <= wire.BATCHES, EVENTS <= wire.EVENTS, COMPRESSED_BYTES <= 1 << 20)


def test_the_agent_keeps_within_the_portals_limits() -> None:
    assert all(LIMITS)


def test_agent_and_portal_have_the_same_columns() -> None:
    assert COLUMNS == GPU_FIELDS


@pytest.mark.slow
def test_all_that_it_sends_is_well_formed(agent: Running, gpus: StandIn) -> None:
    gpus.set_state("3 process 1 512", "5 mig 1", "5 slice 1 20480")
    agent.start(VIGIL_AGENT_MOUNTS="/proc")
    until(lambda: [batch for batch in agent.portal.batches() if len(batch["gpus"]) == 8])
    gpus.set_state("3 lost 1")
    agent.kmsg.append(
        "NVRM: Xid (PCI:0000:05:00): 43, pid=7, name=\\x1b[31m\\x00 name, Ch 00000008",
        "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    )
    until(lambda: {"gpu.lost", "xid", "sxid", "facts", "boot"} <= {event["kind"] for event in agent.portal.events()})
    before = len(agent.portal.batches())
    until(lambda: len(agent.portal.batches()) > before + 1)  # the first may have begun before it was lost
    for post in agent.portal.posts:
        for batch in post["batches"]:
            batch |= {"at": int(batch["at"]), "period": 1}  # the portal knows whole seconds alone
        report = wire.parse(json.dumps(post).encode())
        assert report.first == post["first"]
    sampled = [batch for post in agent.portal.posts for batch in post["batches"] if batch["n"]]
    assert sampled[-1]["gpus"] == [uuid(number) for number in range(8) if number != 3]
