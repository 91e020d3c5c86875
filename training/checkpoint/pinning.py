"""Main memory that a GPU copies into at its full bandwidth, registered as it is.

torch's own pinned memory comes in powers of two, up to twice what is needed.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20
"""Smaller buffers are not pinned: registering one takes longer than it saves."""


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def room_for(tensor: Tensor) -> Tensor:
    """Main memory for a copy of a GPU's tensor.

    What is worth pinning has its pages to itself: of two blocks from malloc one may begin on the page that the other
    ends on, and a page can't be registered twice.
    """
    if tensor.nbytes < LEAST_BYTES:
        return torch.empty_like(tensor, device="cpu")
    memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    laid_out = torch.empty_like(tensor, device="meta")
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(laid_out.shape, laid_out.stride())


def wait_for_copies() -> None:
    """Waits for the copies that this thread has begun: until then what was copied from the GPU is not all there."""
    torch.cuda.current_stream().synchronize()


def pin(buffer: Tensor) -> str:
    """Nothing where that went well; else why not: then the buffer is as good as before, but copied into more slowly."""
    error = runtime().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 1)  # 1: for every device
    if int(error) == 0:
        return ""
    forget_error()
    return f"{runtime().cudaGetErrorString(error)}, {buffer.nbytes:,} bytes"


def unpin(buffer: Tensor) -> None:
    if buffer.nbytes >= LEAST_BYTES and torch.cuda.is_available() and buffer.is_pinned():
        runtime().cudaHostUnregister(buffer.data_ptr())


def forget_error() -> None:
    """CUDA keeps a call's error for this thread's next kernel, which would be blamed for it: one of no account is."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
