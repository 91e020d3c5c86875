"""Attention of stacked clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def as_products() -> Iterator[None]:
    """Takes attention apart into products: for fused kernels torch has no rule for stacks, and takes one client after
    the other through them.

    In half precision the products stay in it. Brought to float32, as is torch's way, they fail on the way back where
    autocast surrounds the way there alone (2.13).
    """
    before = cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        cuda.allow_fp16_bf16_reduction_math_sdp(before)
