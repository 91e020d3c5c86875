"""Test how a rank learns that its run is to stop."""

from __future__ import annotations

from pathlib import Path

from training.attempt.files import write_json
from training.attempt.stopping import REQUESTED, StopRequest


def test_the_reason_is_read_at_once_where_another_rank_saw_the_request_first(tmp_path: Path) -> None:
    stop = StopRequest()
    stop.watch(tmp_path)
    assert not stop.is_requested
    write_json(tmp_path / REQUESTED, {"reason": "cancel"})
    assert stop.reason() == "cancel"
    assert stop.is_requested
