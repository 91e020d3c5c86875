"""Test `vigil gameday` of this machine: a rank is killed, and training goes on as if nothing had happened."""

from __future__ import annotations

import json

import pytest

from tests.stack import Stack

pytestmark = pytest.mark.slow


def test_a_killed_rank(portal_up: Stack) -> None:
    done = portal_up.vigil("gameday", "--fault", "kill", "--json", timeout_s=400)
    assert done.returncode == 0, done.stderr + done.stdout
    game_day = json.loads(done.stdout)
    undisturbed, killed = game_day["drills"]
    assert (undisturbed["state"], killed["state"]) == ("passed", "passed"), killed
    assert killed["action"].endswith("Restarted from step 30 as attempt 2. Restart 1 of 1."), killed
    assert killed["are_losses_identical"] is True
    assert 0 < killed["noticed_s"] < killed["training_again_s"]
