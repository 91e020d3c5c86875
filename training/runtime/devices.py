"""What each rank computes on, and whether that is what the run asked for."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Seen:
    """What one rank has found."""

    node: str
    kind: str
    """The kind of its device: cuda, cpu."""
    gpus: int
    """GPUs that torch sees there."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES there; None: not set."""
    cuda: bool = True
    """Whether its torch is built for GPUs at all."""


def own(*, on_cpu: bool) -> torch.device:
    """This rank's GPU, made the current one; a CPU if it wants one, or sees no GPU for itself."""
    gpu = int(os.environ.get("LOCAL_RANK", "0"))
    if on_cpu or gpu >= _gpus():
        return torch.device("cpu")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def look(device: torch.device) -> Seen:
    """What this rank has found, for `problem`, on whichever rank that is asked."""
    return Seen(
        node_name(),
        device.type,
        _gpus(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        cuda=torch.version.cuda is not None or torch.version.hip is not None,
    )


def problem(seen: Sequence[Seen], *, gpus_per_node: int) -> str | None:
    """What is wrong with what the ranks found, in order, said of `gpus_per_node`; 0: the run doesn't say.

    A run that wants CPUs has nothing to ask.
    """
    lacking = [rank for rank, one in enumerate(seen) if one.kind == "cpu"]
    if not lacking or (not gpus_per_node and len(lacking) == len(seen)):
        return None
    first, more = seen[lacking[0]], len(lacking) - 1
    asked = f"is {gpus_per_node}" if gpus_per_node else "is left out, and other ranks have GPUs"
    who = f"rank {lacking[0]} on {first.node}" + (f" and {more} more see" if more else " sees")
    found = f"too few, {first.gpus}" if first.gpus else "no GPU"
    return f"{asked}, but {who} {found}. {_remedy(first)} To train on CPUs write 0."


def node_name() -> str:
    return os.environ.get("VIGIL_NODE") or platform.node()


def _remedy(seen: Seen) -> str:
    if not seen.cuda:
        return "The torch there is built without CUDA: install one with it."
    if seen.visible is not None:
        return f'There CUDA_VISIBLE_DEVICES is "{seen.visible}": look at what sets it.'
    return "Look at nvidia-smi there, and at what the driver wrote to the kernel's log."


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
