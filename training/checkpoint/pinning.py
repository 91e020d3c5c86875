"""Main memory that a GPU copies into at its full bandwidth, registered as it is.

torch's own pinned memory comes in powers of two, up to twice what is needed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20
"""Smaller buffers are not pinned: registering one takes longer than it saves."""


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def wait_for_copies() -> None:
    """Of this thread: until then what was copied from the GPU is not all there."""
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
