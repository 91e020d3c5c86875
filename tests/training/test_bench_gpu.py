"""Test the GPU benchmark without a GPU: every row's code with a tiny model, and no accidental figures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import NOT_MEASURED, gpu, gpu_rows
from bench.gpu_rows import Row
from training.runtime.distributed import World

ROOT = Path(__file__).parents[2]


def bench(*arguments: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench", "gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_tiny_runs_every_row_and_claims_nothing():
    text, report = bench("--tiny")
    assert "TINY, on a CPU" in text
    assert [row["met"] for row in report["rows"]] == [None] * 12
    names = " ".join(row["name"] for row in report["rows"])
    for what in ("MFU", "bare loop", "FP8 against bf16", "checkpoint stall", "dcp.save", "telemetry", "bitwise"):
        assert what in names
    losses = [line.split()[-1] for line in text.splitlines() if line.startswith(("  ours  ", "  bare  "))]
    assert len(losses) == 4
    assert len(set(losses)) == 1, "ours and the bare loop did not train the same"
    for what in ("where ours spends its time", "attention: torch's choice", "optimizer, a step"):
        assert what in text


@pytest.mark.slow
def test_without_a_gpu_a_row_is_not_measured():
    text, report = bench("--row", "mfu", code=NOT_MEASURED)
    assert report["rows"] == [{"name": "mfu", "figure": "not measured: no GPU here", "bar": "", "met": None}]
    assert "no GPU" in report["environment"]
    assert "srun --gpus 1" in text, "where it could be measured"


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("pass", ""),
        ("raise SystemExit(7)", "ended with exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        ("import subprocess; subprocess.run(['sleep', '600'])", "stopped after 2 s"),
    ],
)
@pytest.mark.lengthy
def test_the_outcome_of_a_row_is_reported(script: str, outcome: str):
    assert gpu.run_row([sys.executable, "-S", "-c", script], seconds=2 if "sleep" in script else 60) == outcome


def test_a_row_that_fails_keeps_what_was_measured_before():
    def rows():
        yield Row("mfu, small", "47 %", "≥ 45 %", True)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with …")

    stored: list[dict[str, Any]] = []
    gpu.measure("mfu", rows, stored.append)
    assert [(row["name"], row["met"]) for row in stored] == [("mfu, small", True), ("mfu", False)]
    assert stored[1]["figure"] == "failed: RuntimeError: CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(("seconds", "pairs"), [(10.0, 5), (200.0, 3), (2000.0, 1)])
def test_a_slow_row_measures_fewer_pairs(seconds: float, pairs: int, monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr(gpu_rows, "time", SimpleNamespace(monotonic=lambda: now))
    setting = gpu_rows.Setting(World(0, 1, torch.device("cpu")), Path(), pairs=5, tiny=False, until=1650.0)
    done = 0
    while setting.has_time_for(done, seconds):
        done, now = done + 1, now + seconds
    assert done == pairs
