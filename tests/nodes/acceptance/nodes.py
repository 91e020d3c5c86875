"""Healthy nodes for tests of acceptances."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nodes.acceptance.facts import GpuConfiguration, NodeConfiguration

URL = "https://vigil.lab.example"


def gpu(index: int = 0, **changes: Any) -> GpuConfiguration:
    same = GpuConfiguration(
        uuid=f"GPU-{index}", index=index, model="NVIDIA H100", vbios="96.00.5E", memory_mib=81_559, power_cap_watts=700,
        pcie_width=16, pcie_width_most=16, pcie_generation=5, pcie_generation_most=5, nvlinks=(True,) * 18,
        has_ecc=True, is_working=True,
    )  # fmt: skip
    return replace(same, **changes)


def node(name: str = "dgx-01", **changes: Any) -> NodeConfiguration:
    same = NodeConfiguration(
        node=name, expected_gpus=2, scheduler_gpus=2, is_reporting=True, has_token=True, driver="570.86.15",
        kernel="Linux 6.8.0", gpus=(gpu(0), gpu(1)), topology=(("X", "NV18"), ("NV18", "X")),
        mounts={"/data": "nfs01:/data", "/": "/dev/sda1"},
        clock_offset_s=0.2, memlock_bytes=-1, open_files=1_048_576, shm_bytes=2**36,
    )  # fmt: skip
    return replace(same, **changes)
