"""Buckets of gradients averaged in a type of 16 bits.

torch's own hooks do the same sums. DDP refuses its bf16 hook, by its name, where there is no NCCL; but gloo adds bf16
up as well as fp16 (torch 2.13; a test compares the sums), so ours runs anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from training.comm._exchange import Hook, Peers, mean


class Halved(Hook):
    def __init__(self, peers: Peers, kind: torch.dtype) -> None:
        super().__init__(peers)
        self._kind = kind

    def send(self, bucket: GradBucket) -> Future[Tensor]:
        """Each replica's gradient is rounded, divided, rounded again, and then added up in that type."""
        whole = bucket.buffer()
        short = whole.to(self._kind)
        self.count_all_reduce(short.nbytes)
        found: Future[Tensor] = mean(short, self.peers).then(lambda done: whole.copy_(done.value()))
        return found
