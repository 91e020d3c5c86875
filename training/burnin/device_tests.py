"""Test one device: write and read back its memory, and multiply matrices whose result must always be the same.

The inputs of the products are whole numbers from a generator with a fixed seed on the CPU: the same on every host, and
so small that float32 holds every sum exactly, whatever the order. So every device of a model, with the same software,
must return the same bits. One that does not corrupts data silently (Dixit et al. 2021, "Silent data corruptions at
scale").
"""

from __future__ import annotations

import hashlib
import time

import torch

from training.burnin.devices import basis
from training.burnin.results import emit, outcome_of, result

CHUNK_BYTES = 1 << 28
PATTERNS = (0x5555555555555555, -0x5555555555555556, 0, -1)
MEMORY_SHARE = 0.9
CPU_MEMORY_BYTES = 1 << 28
MEMORY_TIME_SHARE = 0.4  # of a device's seconds; the rest is for the products
SIZES = {"cuda": (8192, torch.bfloat16), "cpu": (512, torch.float32)}
SEED = 27
MAX_INPUT = 127  # bfloat16 holds it exactly, too


def test_device(gpu: int | None, item: str, *, seconds: float) -> None:
    """Test a GPU, or with None the CPUs, for some seconds."""
    emit({"begin": "memory", "item": item})
    if gpu is None:
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
    test_memory(device, item, until=time.monotonic() + seconds * MEMORY_TIME_SHARE)
    emit({"begin": "matrix", "item": item})
    test_products(device, item, until=time.monotonic() + seconds * (1 - MEMORY_TIME_SHARE))


def test_memory(device: torch.device, item: str, *, until: float) -> None:
    """Fill nearly all free memory with patterns, and read it back after everything was written."""
    chunks = _allocate(device)
    began, passes, wrong = time.monotonic(), 0, 0
    while passes == 0 or time.monotonic() < until:
        pattern = PATTERNS[passes % len(PATTERNS)]
        for number, chunk in enumerate(chunks):
            chunk.fill_(pattern ^ number)
        for number, chunk in enumerate(chunks):
            wrong += int((chunk != (pattern ^ number)).sum())
        passes += 1
    size = sum(chunk.numel() * chunk.element_size() for chunk in chunks)
    rate = 2 * size * passes / (time.monotonic() - began) / 1e9
    words = "word" if wrong == 1 else "words"
    detail = f"{wrong:,} {words} read back differ from what was written" if wrong else ""
    emit(
        result(
            "memory", item, outcome=outcome_of(not wrong), value=rate, unit="GB/s", basis=basis(device), detail=detail
        )
    )


def _allocate(device: torch.device) -> list[torch.Tensor]:
    """Return chunks that fill most of the free memory: another process, or ECC, may take a part of it."""
    if device.type == "cpu":
        return [torch.empty(CPU_MEMORY_BYTES // 8, dtype=torch.int64)]
    free, _ = torch.cuda.mem_get_info(device)
    chunks = []
    for _ in range(max(1, int(free * MEMORY_SHARE) // CHUNK_BYTES - 1)):  # the comparison needs room for one result
        try:
            chunks.append(torch.empty(CHUNK_BYTES // 8, dtype=torch.int64, device=device))
        except torch.OutOfMemoryError:
            break
    if not chunks:
        raise RuntimeError("no memory can be allocated")
    return chunks


def test_products(device: torch.device, item: str, *, until: float) -> None:
    """Repeat one product and compare every repetition bit by bit with the first; report its digest and the rate."""
    size, dtype = SIZES[device.type]
    if device.type == "cpu":
        torch.set_num_threads(1)  # the rate must not depend on how many CPUs the job got
    generator = torch.Generator().manual_seed(SEED)
    left, right = (
        torch.randint(-MAX_INPUT, MAX_INPUT + 1, (size, size), generator=generator, dtype=torch.int8).to(device, dtype)
        for _ in range(2)
    )
    first = left @ right
    digest = hashlib.sha256(first.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    began, products, wrong = time.monotonic(), 0, 0
    while products == 0 or time.monotonic() < until:
        for _ in range(8):
            product = left @ right
            wrong += not torch.equal(product, first)
            products += 1
    rate = 2 * size**3 * products / (time.monotonic() - began) / 1e12
    detail = f"{wrong:,} of {products:,} products of the same matrices differ from the first one" if wrong else ""
    emit(
        result(
            "matrix",
            item,
            outcome=outcome_of(not wrong),
            value=rate,
            unit="TFLOP/s",
            digest=digest,
            detail=detail,
            basis=f"{basis(device)}, {size} {str(dtype).removeprefix('torch.')}",
        )  # fmt: skip
    )
