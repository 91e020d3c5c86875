"""Buckets of gradients averaged in a 16-bit type.

torch's own hooks compute the same sums. DDP refuses its bf16 hook, by name, where there is no NCCL; but gloo adds
bf16 as well as fp16 (torch 2.13; a test compares the sums), so ours runs anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from training.comm._exchange import HookExchange, Peers, average


class HalfPrecision(HookExchange):
    def __init__(self, peers: Peers, dtype: torch.dtype) -> None:
        super().__init__(peers)
        self._dtype = dtype

    def send(self, bucket: GradBucket) -> Future[Tensor]:
        """Round each replica's gradient, divide it, round again, and add up in that type."""
        whole = bucket.buffer()
        half = whole.to(self._dtype)
        self.count_all_reduce(half.nbytes)
        result: Future[Tensor] = average(half, self.peers).then(lambda done: whole.copy_(done.value()))
        return result
