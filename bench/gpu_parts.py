"""Measure each part of a step by itself on this GPU: where MFU falls short, the slow part shows here.

Products in the model's own shapes, attention by each of torch's kernels, the loss as it is and compiled, the
optimizer's pass over memory, the casts of the weights. Forward and backward, one micro-batch, medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu_loops import Size, wait
from training.config.dims import Dims
from training.metrics import flops
from training.recipes import language

REPEATS = 10
ADAMW_BYTES = 28
"""A parameter: it, its gradient and two moments read, all but the gradient written, in float32."""
ATTENTION = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


@dataclass(frozen=True)
class GpuPart:
    name: str
    milliseconds: float
    """Of one micro-batch; of the optimizer, of a step."""
    reached: str


def parts(size: Size, device: torch.device) -> Iterator[GpuPart]:
    """Yield each part with its figure, one after the other."""
    dims = language.dims(vocabulary=size.vocabulary, **size.model)
    rows = size.micro_batch * dims.context
    for name, inner, outer, times in (
        ("gate, up", dims.width, dims.hidden, 2 * dims.layers),
        ("down", dims.hidden, dims.width, dims.layers),
        ("query, out", dims.width, dims.heads * dims.head_width, 2 * dims.layers),
        ("key, value", dims.width, dims.kv_heads * dims.head_width, 2 * dims.layers),
        ("head", dims.width, dims.vocabulary, 1),
    ):
        yield _product(f"products: {name}", rows, inner, outer, times, device)
    yield from _attention(size, dims, device)
    yield from _loss(rows, dims.vocabulary, device, compiled=size.compile)
    yield from _memory(dims.parameters, device)


def _product(name: str, rows: int, inner: int, outer: int, times: int, device: torch.device) -> GpuPart:
    left = torch.randn(rows, inner, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(outer, inner, device=device, dtype=torch.bfloat16, requires_grad=True)
    above = torch.randn(rows, outer, device=device, dtype=torch.bfloat16)
    seconds = _seconds(lambda: torch.autograd.grad(functional.linear(left, weight), (left, weight), above), device)
    return GpuPart(
        f"{name}, {rows} × {inner} × {outer}", seconds * times * 1e3, _rate(6.0 * rows * inner * outer / seconds)
    )


def _attention(size: Size, dims: Dims, device: torch.device) -> Iterator[GpuPart]:
    def heads(count: int) -> Tensor:
        shape = (size.micro_batch, dims.context, count, dims.head_width)
        return torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    query, key, value = heads(dims.heads), heads(dims.kv_heads), heads(dims.kv_heads)
    above = torch.randn_like(query)
    grouped = dims.heads != dims.kv_heads
    # Forward and backward, of the causal half.
    work = 12.0 * size.micro_batch * dims.heads * dims.head_width * dims.context**2 / 2

    def run() -> object:
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return torch.autograd.grad(mixed, (query, key, value), above)

    seconds = _seconds(run, device)
    yield GpuPart("attention: torch's choice", seconds * dims.layers * 1e3, f"{_rate(work / seconds)}, causal half")
    for backend in ATTENTION:
        name = f"attention: {backend.name.lower().removesuffix('_attention')}"
        try:
            with sdpa_kernel(backend):
                seconds = _seconds(run, device)
        except RuntimeError as error:
            yield GpuPart(name, float("nan"), f"not here: {str(error).splitlines()[0][:60]}")
            continue
        yield GpuPart(name, seconds * dims.layers * 1e3, f"{_rate(work / seconds)}, causal half")


def _loss(rows: int, vocabulary: int, device: torch.device, *, compiled: bool) -> Iterator[GpuPart]:
    logits = torch.randn(rows, vocabulary, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,), device=device)

    def entropy(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float(), targets)

    seconds = _seconds(lambda: torch.autograd.grad(entropy(logits), logits), device)
    yield GpuPart(f"loss: as it is, {rows} × {vocabulary}", seconds * 1e3, "")
    if compiled:
        fused = torch.compile(entropy)
        seconds = _seconds(lambda: torch.autograd.grad(fused(logits), logits), device)
        yield GpuPart("loss: compiled", seconds * 1e3, "")


def _memory(parameters: int, device: torch.device) -> Iterator[GpuPart]:
    weight = torch.nn.Parameter(torch.randn(parameters, device=device))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    seconds = _seconds(optimizer.step, device)
    yield GpuPart("optimizer, a step", seconds * 1e3, f"{ADAMW_BYTES * parameters / seconds / 1e9:,.0f} GB/s")
    seconds = _seconds(lambda: weight.detach().to(torch.bfloat16), device)
    yield GpuPart("casts of the weights", seconds * 1e3, f"{6 * parameters / seconds / 1e9:,.0f} GB/s")


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of one call; the device is idle before and after each."""
    found = []
    for repeat in range(REPEATS + 2):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        if repeat > 1:
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def _rate(per_second: float) -> str:
    peak = flops.peak(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    share = f", {100 * per_second / peak:.0f} % of the peak" if peak else ""
    return f"{per_second / 1e12:,.3g} TFLOP/s{share}"
