"""Compute the attention of stacked clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def as_products() -> Iterator[None]:
    """Compute attention as plain matrix products inside the block.

    vmap has no batching rule for torch's fused kernels, and would run them for one client after the other. In half
    precision the products stay in it: converted to float32, torch's default, their backward pass fails where autocast
    surrounds the forward pass alone (2.13).
    """
    before = cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        cuda.allow_fp16_bf16_reduction_math_sdp(before)
