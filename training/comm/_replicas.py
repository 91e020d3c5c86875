"""Replicas that take steps of their own, and become one model again every so many.

Every `every` steps, and after the last, each replica's way since then, averaged over all, is a gradient that an outer
optimizer takes a step along, from where all had begun (SGD with Nesterov's momentum). With a learning rate of 1 and no
momentum that is the mean of the replicas.

What all agreed on last is the model in a checkpoint; what a replica has gone since, and its optimizer's state, is its
own, below "comm". So a checkpoint fits any number of replicas: those that it has nothing of begin where all agreed,
with the first one's optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.checkpoint.staging import tree, walk
from training.comm._exchange import Exchange, Peers, State, all_reduced, broadcast

Tensors = tuple[Tensor, ...] | list[Tensor]


class Replicas(Exchange):
    is_apart = True

    def __init__(self, peers: Peers, *, every: int, learning_rate: float = 1.0, momentum: float = 0.0) -> None:
        self._peers, self._every = peers, every
        self._learning_rate, self._momentum = learning_rate, momentum
        self._own = {name: parameter.detach() for name, parameter in peers.parameters.items()}
        self._buffers = dict(peers.buffers)
        trained = {parameter.data_ptr() for parameter in self._own.values()}
        self._averaged = [buffer for buffer in self._buffers.values() if buffer.data_ptr() not in trained]
        """The buffers without those that are a parameter's second name (tied weights): they have its memory."""
        self._agreed: State = {}
        """Parameters and buffers as all replicas had them last."""
        self._velocity = {name: torch.zeros_like(part) for name, part in self._own.items()} if momentum else {}
        self._is_here = torch.ones((), dtype=torch.uint8)
        """Is read together with what this replica has of its own, so that one knows whether the checkpoint had it."""
        self._sent = 0.0

    def attach(self, model: nn.Module) -> None:
        broadcast([*self._own.values(), *self._averaged], self._peers)
        self._agreed = {name: part.clone() for name, part in {**self._own, **self._buffers}.items()}

    def step(self, number: int, skipped: Tensor | None = None, frozen: Tensor | None = None) -> None:
        if number % self._every == 0 or number == self._peers.steps:
            self.agree(frozen)

    @torch.no_grad()
    def agree(self, frozen: Tensor | None = None) -> None:
        """One outer step: afterwards all replicas are the same, bit for bit, or `frozen` as they were."""
        own = list(self._own.values())
        agreed = [self._agreed[name] for name in self._own]
        ways = torch._foreach_sub(agreed, own)
        self._average(ways)
        torch._foreach_sub_(agreed, self._outer(ways), alpha=self._learning_rate)
        stays = own[0].new_zeros((), dtype=torch.bool) if frozen is None else frozen > 0
        for mine, common in zip(own, agreed, strict=True):
            torch.where(stays, mine, common, out=mine)
        self._average(self._averaged)
        for name, buffer in self._buffers.items():
            self._agreed[name].copy_(buffer)

    def _outer(self, ways: Tensors) -> Tensors:
        if not self._momentum:
            return ways
        velocity = list(self._velocity.values())
        torch._foreach_mul_(velocity, self._momentum)
        torch._foreach_add_(velocity, ways)
        found: Tensors = torch._foreach_add(ways, velocity, alpha=self._momentum)
        return found

    def _average(self, tensors: Iterable[Tensor]) -> None:
        peers, works = self._peers, []
        for tensor in tensors if peers.count > 1 else ():
            tensor /= peers.count
            works.append(dist.all_reduce(tensor, group=peers.group, async_op=True))
            self._sent += all_reduced(tensor.nbytes, peers.count)
        for work in works:
            assert work is not None, "this rank is one of the group"
            work.wait()

    def communicated(self, micro_batches: int) -> float:
        sent, self._sent = self._sent, 0.0
        return sent

    def saved(self, model: State, optimizer: State) -> State:
        leads = self._peers.index == 0
        return self._tree(model, optimizer, optimizer if leads else {})

    def restore(self, read: Callable[[State], None], model: State, optimizer: State) -> None:
        leads = self._peers.index == 0
        first = optimizer if leads else tree({path: torch.zeros_like(part) for path, part in walk(optimizer)})
        self._is_here.zero_()
        read(self._tree(model, optimizer, first))
        if not self._is_here:
            for name, part in {**self._own, **self._buffers}.items():
                part.copy_(self._agreed[name])
            for (_, part), (_, read_part) in zip(walk(optimizer), walk(first), strict=True):
                part.copy_(read_part)
        self._is_here.fill_(1)

    def _tree(self, model: State, optimizer: State, first: State) -> State:
        """`first`: the first replica's optimizer, of which it has no second copy."""
        own: State = {"model": {**self._own, **self._buffers}, "here": self._is_here}
        if self._peers.index:
            own["optimizer"] = optimizer
        comm = {"velocity": self._velocity, "replicas": {str(self._peers.index): own}}
        return {"model": {**model, **self._agreed}, "optimizer": first, "comm": comm}
