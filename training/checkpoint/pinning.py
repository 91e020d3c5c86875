"""Pin main memory, so that a GPU copies into it at full bandwidth; it is registered in place.

torch's own pinned memory is allocated in powers of two, up to twice what is needed.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

MIN_BYTES = 1 << 20
"""Smaller buffers are not pinned: registering one takes longer than it saves."""


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def allocate_for(tensor: Tensor) -> Tensor:
    """Allocate main memory for a copy of a GPU's tensor.

    Memory worth pinning does not share its pages: a block from malloc may begin on the page where another one ends,
    and a page cannot be registered twice.
    """
    if tensor.nbytes < MIN_BYTES:
        return torch.empty_like(tensor, device="cpu")
    memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    layout = torch.empty_like(tensor, device="meta")
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(layout.shape, layout.stride())


def wait_for_copies() -> None:
    """Wait for the copies that this thread has started: until then the copied data is incomplete."""
    torch.cuda.current_stream().synchronize()


def pin(buffer: Tensor) -> str:
    """Pin a buffer; return "" or why that failed. The buffer remains usable then, but copies into it are slower."""
    error = runtime().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 1)  # 1: for every device
    if int(error) == 0:
        return ""
    forget_error()
    return f"{runtime().cudaGetErrorString(error)}, {buffer.nbytes:,} bytes"


def unpin(buffer: Tensor) -> None:
    if buffer.nbytes >= MIN_BYTES and torch.cuda.is_available() and buffer.is_pinned():
        runtime().cudaHostUnregister(buffer.data_ptr())


def forget_error() -> None:
    """Clear CUDA's error of the last call, which the thread's next kernel would otherwise report as its own."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
