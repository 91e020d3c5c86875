"""Test runs that request GPUs and find none: all ranks report it alike, and none goes on without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.training.ranks import Run
from training import run_file
from training.runtime import devices
from training.runtime.devices import RankDevice, problem

FINE = RankDevice("dgx-01", "cuda", 8)
BLIND = RankDevice("dgx-02", "cpu", 0, visible="")


def test_alike_is_no_problem() -> None:
    assert problem([FINE, FINE], gpus_per_node=2) is None
    assert problem([BLIND, BLIND], gpus_per_node=0) is None, "none are requested, and none are there"


@pytest.mark.parametrize(
    ("rank_devices", "gpus", "message"),
    [
        (
            [FINE, FINE, BLIND, BLIND],
            2,
            'is 2, but rank 2 on dgx-02 and 1 more see no GPU. CUDA_VISIBLE_DEVICES is "" there: check what sets it. '
            "To train on CPUs, write 0.",
        ),
        (
            [RankDevice("dgx-01", "cpu", 0)],
            1,
            "is 1, but rank 0 on dgx-01 sees no GPU. Check nvidia-smi there, and the driver's messages in the "
            "kernel log. To train on CPUs, write 0.",
        ),
        (
            [FINE, RankDevice("dgx-01", "cpu", 1, visible="0")],
            2,
            'is 2, but rank 1 on dgx-01 sees too few, 1. CUDA_VISIBLE_DEVICES is "0" there: check what sets it. '
            "To train on CPUs, write 0.",
        ),
        (
            [RankDevice("dgx-01", "cpu", 0, cuda=False, visible="0")],
            1,
            "is 1, but rank 0 on dgx-01 sees no GPU. torch there is built without CUDA: install a version with CUDA. "
            "To train on CPUs, write 0.",
        ),
        (
            [FINE, BLIND],
            0,
            "is not set, and other ranks have GPUs, but rank 1 on dgx-02 sees no GPU. CUDA_VISIBLE_DEVICES is "
            '"" there: check what sets it. To train on CPUs, write 0.',
        ),
    ],
)
def test_ranks_without_a_gpu_are_named_with_what_to_check(
    rank_devices: list[RankDevice], gpus: int, message: str
) -> None:
    assert problem(rank_devices, gpus_per_node=gpus) == message


def test_a_rank_takes_the_gpu_of_its_place_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for local, expected in (("0", "cuda:0"), ("1", "cuda:1"), ("2", "cpu")):
        monkeypatch.setenv("LOCAL_RANK", local)
        assert devices.select(on_cpu=False) == torch.device(expected)
        assert devices.select(on_cpu=True) == torch.device("cpu")
    assert taken == [0, 1]
    assert devices.describe(torch.device("cpu")).gpus == 2


@pytest.mark.parametrize(
    ("table", "gpus", "on_cpu"), [("gpus_per_node = 8", 8, False), ("gpus_per_node = 0", 0, True), ("", 0, False)]
)
def test_a_run_states_how_many_gpus_it_needs(table: str, gpus: int, on_cpu: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[resources]\n{table}\n[run]\n")
    assert (run_file.load(path).gpus_per_node, run_file.load(path).on_cpu) == (gpus, on_cpu)


def hide_gpus() -> None:
    """Hide all GPUs as if the driver were gone; only the first rank then has a device that is not a CPU."""
    torch.cuda.is_available = lambda: False
    select = devices.select
    if os.environ["RANK"] == "0":
        devices.select = lambda *, on_cpu: select(on_cpu=on_cpu) if on_cpu else torch.device("meta")
    os.environ["VIGIL_NODE"] = f"dgx-{os.environ['RANK']}"


@pytest.mark.slow
def test_all_ranks_refuse_together(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", launch={"gpus_per_node": 1}, spy=f"{__name__}:hide_gpus")
    incarnation = run.start(3)
    assert incarnation.wait() == [1, 1, 1], incarnation.output()
    for rank in range(3):
        (failed,) = run.events("run.failed", rank=rank)
        assert failed["exception"] == "ConfigError"
        assert "resources.gpus_per_node: is 1, but rank 1 on dgx-1 and 1 more see no GPU." in failed["error"]
    assert not run.series()
