"""Top-k with error feedback: what is not sent is added to the next step's gradient, so nothing is lost, only late."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from training.comm._exchange import HookExchange, Peers, State


class SparseExchange(HookExchange):
    """Sends 8 bytes per number: its value and its position in the bucket (buckets have fewer than 2^31 numbers)."""

    def __init__(self, peers: Peers, density: float) -> None:
        super().__init__(peers)
        self._density = density
        self._unsent = {name: torch.zeros_like(parameter) for name, parameter in peers.parameters.items()}
        self._unsent_before = {name: torch.zeros_like(parameter) for name, parameter in peers.parameters.items()}
        """What had not been sent when the step began."""

    @torch.no_grad()
    def send(self, bucket: GradBucket) -> Future[Tensor]:
        names = self.names(bucket)
        unsent = [self._unsent[name].view(-1) for name in names]
        torch._foreach_copy_([self._unsent_before[name].view(-1) for name in names], unsent)
        whole = bucket.buffer()
        whole += torch.cat(unsent)
        positions = whole.abs().topk(math.ceil(self._density * whole.numel()), sorted=False).indices
        packet = torch.cat([positions.to(torch.int32), whole[positions].float().view(torch.int32)])
        whole[positions] = 0
        torch._foreach_copy_(unsent, torch.split(whole, [part.numel() for part in unsent]))
        return self._sum(whole, packet)

    def _sum(self, whole: Tensor, packet: Tensor) -> Future[Tensor]:
        """Add up into `whole`, replica after replica, so that all get the same bits."""
        group, count = self.peers.group, self.peers.count
        packets = packet.new_empty(count * packet.numel())
        self.count_all_gather(packet.nbytes)
        work = dist.all_gather_single(packets, packet, group=group, async_op=True)

        def add(_: Future[Tensor]) -> Tensor:
            whole.zero_()
            for received in packets.view(count, 2, -1):
                positions, values = received[0].long(), received[1].view(torch.float32)
                whole[positions] += values.to(whole.dtype)
            return whole.div_(count)

        result: Future[Tensor] = work.get_future().then(add)
        return result

    @torch.no_grad()
    def step(self, number: int, skipped: Tensor | None = None, frozen: Tensor | None = None) -> None:
        """Undo a skipped step.

        Its gradient must not be sent late, and what had not been sent before it has not been used.
        """
        if skipped is not None:
            for name, unsent in self._unsent.items():
                torch.where(skipped > 0, self._unsent_before[name], unsent, out=unsent)

    def begin(self) -> None:
        super().begin()
        torch._foreach_zero_(list(self._unsent.values()))

    def state(self) -> State:
        """Return what has not been sent. A single replica sends everything: earlier leftovers would be late."""
        if self.peers.count == 1:
            return {}
        return {"kept": {str(self.peers.index): dict(self._unsent)}}
