"""Test the shipper next to the ranks: its failures do not affect them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from training.launch.attempt import Attempt
from training.launch.plan import LaunchPlan
from training.launch.shipping import ShipperProcess


def test_a_shipper_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    plan = LaunchPlan(run_dir=tmp_path, scheduler_id="1", restart_count=0, node="a")
    shipping = ShipperProcess(plan, Attempt(tmp_path, 1))
    python = sys.executable
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    text = shipping.poll()
    assert text is not None
    assert text.startswith("the shipper cannot be started: ")
    assert shipping.poll() is None, "not at every look"
    monkeypatch.setattr(sys, "executable", python)
    shipping._next_start = 0.0
    assert shipping.poll() is None
    assert shipping.pid
    shipping.drain()
