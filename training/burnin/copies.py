"""Measure copies: between host and each GPU, and between GPUs; between two places of the host's memory without GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from training.burnin.devices import basis, synchronize
from training.burnin.results import emit, outcome_of, result

COPY_BYTES = 1 << 28
CPU_COPY_BYTES = 1 << 26


def test_copies(gpus: Sequence[int], *, seconds: float) -> None:
    """Copy in every direction, each for an equal part of the seconds, and compare what arrives with what was sent."""
    emit({"begin": "copy", "item": "host"})
    if not gpus:
        _measure(torch.device("cpu"), torch.device("cpu"), "memory to memory", seconds)
        return
    devices = [torch.device("cuda", gpu) for gpu in gpus]
    host = torch.device("cpu")
    directions = [(host, device, f"host to GPU {device.index}") for device in devices]
    directions += [(device, host, f"GPU {device.index} to host") for device in devices]
    directions += [
        (source, target, f"GPU {source.index} to GPU {target.index}")
        for source in devices
        for target in devices
        if source != target
    ]
    for source, target, item in directions:
        emit({"begin": "copy", "item": item})
        _measure(source, target, item, seconds / len(directions))


def _measure(source: torch.device, target: torch.device, item: str, seconds: float) -> None:
    on_cpu = source.type == target.type == "cpu"
    words = (CPU_COPY_BYTES if on_cpu else COPY_BYTES) // 8
    original = torch.arange(1, words + 1, dtype=torch.int64)
    expected = original.to(target)
    sent, received = _place(original, source), _place(torch.zeros_like(original), target)
    received.copy_(sent)  # the first copy pays for setting up the path
    synchronize(source, target)
    until, copies, wrong, spent = time.monotonic() + seconds, 0, 0, 0.0
    while copies == 0 or time.monotonic() < until:
        received.zero_()  # else a copy that never arrives finds the words of the one before
        synchronize(target)
        began = time.monotonic()
        received.copy_(sent, non_blocking=not on_cpu)
        synchronize(source, target)
        spent += time.monotonic() - began
        copies += 1
        wrong += int((received != expected).sum())
    rate = copies * words * 8 / spent / 1e9
    detail = f"{wrong:,} words arrived differently" if wrong else ""
    about = basis(target if target.type == "cuda" else source)
    emit(result("copy", item, outcome=outcome_of(not wrong), value=rate, unit="GB/s", basis=about, detail=detail))


def _place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return tensor.to(device)
    return tensor.clone().pin_memory() if torch.cuda.is_available() else tensor.clone()
