"""Test an agent with a real portal, enrolled on the command line by a sysadmin."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.version import VERSION
from tests.nodes.agent.portal import PortalStandIn
from tests.nodes.agent.running import Running
from tests.nvml import StandIn
from tests.stack import Stack
from tests.waiting import until

NODE = "agent-e2e"


def _stand(portal_up: Stack) -> Any:
    with portal_up.client() as client:
        items = client.get("/api/v1/agents").json()["items"]
    return next((item for item in items if item["node"] == NODE), None)


@pytest.mark.slow
def test_a_node_is_enrolled_and_reports(
    portal_up: Stack, portal_stand_in: PortalStandIn, gpus: StandIn, tmp_path: Path
) -> None:
    done = portal_up.vigil("agent", "enroll", NODE, "--json")
    assert done.returncode == 0, done.stderr
    agent = Running(tmp_path, portal_stand_in, gpus.environment)
    try:
        agent.token_file.write_text("vga_a-wrong-one")
        agent.start(period=1.0, VIGIL_AGENT_URL=portal_up.url, VIGIL_AGENT_NODE=NODE)
        until(lambda: f"creates a new one with `vigil agent enroll {NODE}`" in agent.log)
        agent.kill()
        agent.token_file.write_text(json.loads(done.stdout)["token"])
        agent.start(period=1.0, VIGIL_AGENT_URL=portal_up.url, VIGIL_AGENT_NODE=NODE)
        stand = until(lambda: (found := _stand(portal_up))["gpus"] == 8 and found)
        assert (stand["version"], stand["is_silent"], stand["given_up"]) == (VERSION, False, 0)
        assert abs(stand["clock_offset_s"]) < 5
        time.sleep(2.0)  # a second, at least, is a sample
        agent.end()  # which reports what there is of the first ten
        until(lambda: _stand(portal_up)["sampled_at"])
    finally:
        agent.close()
