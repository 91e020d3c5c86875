"""The bench of a GPU runs where there is none: every row's code with a model of a second, and no figure by accident."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> tuple[str, dict[str, Any]]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench", "gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_tiny_runs_every_row_and_claims_nothing():
    said, told = bench("--tiny")
    assert "TINY, on a CPU" in said
    assert [row["met"] for row in told["rows"]] == [None] * 12
    names = " ".join(row["name"] for row in told["rows"])
    for what in ("MFU", "bare loop", "FP8 against bf16", "checkpoint stall", "dcp.save", "telemetry", "bitwise"):
        assert what in names
    losses = [line.split()[-1] for line in said.splitlines() if line.startswith(("  ours  ", "  bare  "))]
    assert len(losses) == 4
    assert len(set(losses)) == 1, "ours and the bare loop did not train the same"
    for what in ("where ours spends its time", "attention: torch's choice", "optimizer, a step"):
        assert what in said


@pytest.mark.slow
def test_without_a_gpu_a_row_is_not_measured():
    said, told = bench("--row", "mfu")
    assert told["rows"] == [{"name": "mfu", "figure": "not measured: no GPU here", "bar": "", "met": None}]
    assert "no GPU" in told["environment"]
