"""Top-k with error feedback: what is not sent is added to the next step's gradient, so nothing is lost, only late."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from training.comm._exchange import Hook, Peers, State


class Sparse(Hook):
    """A number goes as 8 bytes: itself and where in the bucket it belongs (buckets stay below 2^31 numbers)."""

    def __init__(self, peers: Peers, density: float) -> None:
        super().__init__(peers)
        self._density = density
        self._kept = {name: torch.zeros_like(parameter) for name, parameter in peers.parameters.items()}
        self._before = {name: torch.zeros_like(parameter) for name, parameter in peers.parameters.items()}
        """What was kept when the step began."""

    @torch.no_grad()
    def send(self, bucket: GradBucket) -> Future[Tensor]:
        names = self.names(bucket)
        kept = [self._kept[name].view(-1) for name in names]
        torch._foreach_copy_([self._before[name].view(-1) for name in names], kept)
        whole = bucket.buffer()
        whole += torch.cat(kept)
        places = whole.abs().topk(math.ceil(self._density * whole.numel()), sorted=False).indices
        packet = torch.cat([places.to(torch.int32), whole[places].float().view(torch.int32)])
        whole[places] = 0
        torch._foreach_copy_(kept, torch.split(whole, [part.numel() for part in kept]))
        return self._sum(whole, packet)

    def _sum(self, whole: Tensor, packet: Tensor) -> Future[Tensor]:
        """Into `whole`, replica after replica, so that all come to the same bits."""
        group, count = self.peers.group, self.peers.count
        packets = packet.new_empty(count * packet.numel())
        self.count_all_gather(packet.nbytes)
        work = dist.all_gather_single(packets, packet, group=group, async_op=True)

        def add(_: Future[Tensor]) -> Tensor:
            whole.zero_()
            for received in packets.view(count, 2, -1):
                places, values = received[0].long(), received[1].view(torch.float32)
                whole[places] += values.to(whole.dtype)
            return whole.div_(count)

        found: Future[Tensor] = work.get_future().then(add)
        return found

    @torch.no_grad()
    def step(self, number: int, skipped: Tensor | None = None, frozen: Tensor | None = None) -> None:
        """The gradient of a skipped step must not come late, and what had been kept before it has not been used."""
        if skipped is not None:
            for name, kept in self._kept.items():
                torch.where(skipped > 0, self._before[name], kept, out=kept)

    def begin(self) -> None:
        super().begin()
        torch._foreach_zero_(list(self._kept.values()))

    def state(self) -> State:
        """One replica sends all it has; what it kept before would be late once there are others again."""
        if self.peers.count == 1:
            return {}
        return {"kept": {str(self.peers.index): dict(self._kept)}}
