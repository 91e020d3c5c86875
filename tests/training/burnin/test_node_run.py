"""Two nodes burn in together: real processes, files in a shared run directory, and all-reduce between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
CPU_DIGEST = "711894a6311ca38ca96736f9b1d10eb9dd6d4bbe90da71608b87cef2f6ab3edd"
"""Of any processor, with any vector instructions: sums of whole numbers are exact."""
Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Any:
    running: list[subprocess.Popen[bytes]] = []

    def start_node(name: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "training.burnin", str(tmp_path)], start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "SLURMD_NODENAME": name},
        )  # fmt: skip
        running.append(process)
        return process

    yield start_node
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


def write_plan(run: Path, nodes: list[str], *, seconds: float = 2, mounts: tuple[str, ...] = ()) -> None:
    (run / "portal").mkdir()
    plan = {"nodes": nodes, "seconds": seconds, "mounts": mounts, "scratch": str(run)}
    (run / "portal" / "plan.json").write_text(json.dumps(plan))


def results(run: Path, node: str) -> list[dict[str, Any]]:
    path = run / "job" / "results" / f"{node}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_two_nodes_test_themselves_and_each_other(tmp_path: Path, start: Start) -> None:
    write_plan(tmp_path, ["node-a", "node-b"], mounts=(str(tmp_path), "/does/not/exist"))
    assert [process.wait(300) for process in [start("node-a"), start("node-b")]] == [0, 0]
    digests = set()
    for node, partner in (("node-a", "node-b"), ("node-b", "node-a")):
        found = results(tmp_path, node)
        outcomes = {(line["test"], line["item"]): line["outcome"] for line in found}
        assert outcomes.pop(("mount", "/does/not/exist")) == "failed"
        assert set(outcomes.values()) == {"passed"}, found
        assert {"facts", "memory", "matrix", "copy", "all-reduce", "host memory", "disk", "pair", "end"} == {
            test for test, item in outcomes if test != "mount"
        }
        assert ("pair", partner) in outcomes
        digests |= {line["digest"] for line in found if line["test"] == "matrix"}
    assert digests == {CPU_DIGEST}, "the same inputs give the same bits"


def test_keeps_what_was_found_if_it_is_killed(tmp_path: Path, start: Start) -> None:
    write_plan(tmp_path, ["node-a"], seconds=3_600)
    process = start("node-a")
    until(lambda: any(line["test"] == "facts" for line in results(tmp_path, "node-a")))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    assert [line["test"] for line in results(tmp_path, "node-a")][:1] == ["facts"]


def test_refuses_a_node_that_is_not_in_the_plan(tmp_path: Path, start: Start) -> None:
    write_plan(tmp_path, ["node-a", "node-b"])
    assert start("another").wait(60) == 2
