"""Select each rank's device, and check that it is what the run requested."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RankDevice:
    """The device of one rank and its node's GPUs."""

    node: str
    kind: str
    """Kind of the device: cuda or cpu."""
    gpus: int
    """Number of GPUs that torch finds there."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES there; None: not set."""
    cuda: bool = True
    """Whether torch there is built for GPUs."""


def select(*, on_cpu: bool) -> torch.device:
    """Return this rank's GPU and make it the current one; the CPU if requested, or if there is no GPU for this rank."""
    gpu = int(os.environ.get("LOCAL_RANK", "0"))
    if on_cpu or gpu >= _gpus():
        return torch.device("cpu")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def describe(device: torch.device) -> RankDevice:
    """Describe this rank's device, for `problem`, which any rank can call."""
    return RankDevice(
        node_name(),
        device.type,
        _gpus(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        cuda=torch.version.cuda is not None or torch.version.hip is not None,
    )


def problem(ranks: Sequence[RankDevice], *, gpus_per_node: int) -> str | None:
    """Return what is wrong with the ranks' devices, in order of rank, in terms of `gpus_per_node`; 0: not set.

    Runs on CPUs need not call it.
    """
    without_gpu = [rank for rank, rank_device in enumerate(ranks) if rank_device.kind == "cpu"]
    if not without_gpu or (not gpus_per_node and len(without_gpu) == len(ranks)):
        return None
    first, more = ranks[without_gpu[0]], len(without_gpu) - 1
    setting = f"is {gpus_per_node}" if gpus_per_node else "is not set, and other ranks have GPUs"
    who = f"rank {without_gpu[0]} on {first.node}" + (f" and {more} more see" if more else " sees")
    available = f"too few, {first.gpus}" if first.gpus else "no GPU"
    return f"{setting}, but {who} {available}. {_remedy(first)} To train on CPUs, write 0."


def node_name() -> str:
    return os.environ.get("VIGIL_NODE") or platform.node()


def _remedy(device: RankDevice) -> str:
    if not device.cuda:
        return "torch there is built without CUDA: install a version with CUDA."
    if device.visible is not None:
        return f'CUDA_VISIBLE_DEVICES is "{device.visible}" there: check what sets it.'
    return "Check nvidia-smi there, and the driver's messages in the kernel log."


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
