"""Replicas that take independent steps, and synchronise at intervals of `every` steps.

Every `every` steps, and after the last, each replica's movement since then, averaged over all, is a gradient along
which an outer optimizer takes a step from the common starting point (SGD with Nesterov's momentum). With a learning
rate of 1 and no momentum that is the mean of the replicas.

The model in a checkpoint is the one that all agreed on last; a replica's movement since then, and its optimizer's
state, are stored separately under "comm". So a checkpoint fits any number of replicas: those without state in it
start from the common model, with the first replica's optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.checkpoint.staging import tree, walk
from training.comm._exchange import Exchange, Peers, State, all_reduce_bytes, broadcast

Tensors = tuple[Tensor, ...] | list[Tensor]


class Replicas(Exchange):
    has_independent_replicas = True

    def __init__(self, peers: Peers, *, every: int, learning_rate: float = 1.0, momentum: float = 0.0) -> None:
        self._peers, self._every = peers, every
        self._learning_rate, self._momentum = learning_rate, momentum
        self._local = {name: parameter.detach() for name, parameter in peers.parameters.items()}
        self._buffers = dict(peers.buffers)
        trained = {parameter.data_ptr() for parameter in self._local.values()}
        self._averaged = [buffer for buffer in self._buffers.values() if buffer.data_ptr() not in trained]
        """Buffers, without those that share a parameter's memory under a second name (tied weights)."""
        self._agreed: State = {}
        """Parameters and buffers that all replicas had in common last."""
        self._velocity = {name: torch.zeros_like(part) for name, part in self._local.items()} if momentum else {}
        self._has_state = torch.ones((), dtype=torch.uint8)
        """Read together with this replica's own state, to show whether the checkpoint had any."""
        self._sent = 0.0

    def attach(self, model: nn.Module) -> None:
        broadcast([*self._local.values(), *self._averaged], self._peers)
        self._agreed = {name: part.clone() for name, part in {**self._local, **self._buffers}.items()}

    def step(self, number: int, skipped: Tensor | None = None, frozen: Tensor | None = None) -> None:
        if number % self._every == 0 or number == self._peers.steps:
            self.synchronise(frozen)

    @torch.no_grad()
    def synchronise(self, frozen: Tensor | None = None) -> None:
        """Take one outer step: afterwards all replicas have the same bits, or, if `frozen`, are unchanged."""
        local = list(self._local.values())
        agreed = [self._agreed[name] for name in self._local]
        movements = torch._foreach_sub(agreed, local)
        self._average(movements)
        torch._foreach_sub_(agreed, self._outer_step(movements), alpha=self._learning_rate)
        is_frozen = local[0].new_zeros((), dtype=torch.bool) if frozen is None else frozen > 0
        for parameter, common in zip(local, agreed, strict=True):
            torch.where(is_frozen, parameter, common, out=parameter)
        self._average(self._averaged)
        for name, buffer in self._buffers.items():
            self._agreed[name].copy_(buffer)

    def _outer_step(self, movements: Tensors) -> Tensors:
        if not self._momentum:
            return movements
        velocity = list(self._velocity.values())
        torch._foreach_mul_(velocity, self._momentum)
        torch._foreach_add_(velocity, movements)
        update: Tensors = torch._foreach_add(movements, velocity, alpha=self._momentum)
        return update

    def _average(self, tensors: Iterable[Tensor]) -> None:
        peers, works = self._peers, []
        for tensor in tensors if peers.count > 1 else ():
            tensor /= peers.count
            works.append(dist.all_reduce(tensor, group=peers.group, async_op=True))
            self._sent += all_reduce_bytes(tensor.nbytes, peers.count)
        for work in works:
            assert work is not None, "this rank is one of the group"
            work.wait()

    def sent_bytes(self, micro_batches: int) -> float:
        sent, self._sent = self._sent, 0.0
        return sent

    def saved(self, model: State, optimizer: State) -> State:
        leads = self._peers.index == 0
        return self._tree(model, optimizer, optimizer if leads else {})

    def restore(self, read: Callable[[State], None], model: State, optimizer: State) -> None:
        leads = self._peers.index == 0
        first = optimizer if leads else tree({path: torch.zeros_like(part) for path, part in walk(optimizer)})
        self._has_state.zero_()
        read(self._tree(model, optimizer, first))
        if not self._has_state:
            for name, part in {**self._local, **self._buffers}.items():
                part.copy_(self._agreed[name])
            for (_, part), (_, read_part) in zip(walk(optimizer), walk(first), strict=True):
                part.copy_(read_part)
        self._has_state.fill_(1)

    def _tree(self, model: State, optimizer: State, first: State) -> State:
        """Return the tree of a checkpoint. `first`: the first replica's optimizer, which is not stored twice."""
        state: State = {"model": {**self._local, **self._buffers}, "here": self._has_state}
        if self._peers.index:
            state["optimizer"] = optimizer
        comm = {"velocity": self._velocity, "replicas": {str(self._peers.index): state}}
        return {"model": {**model, **self._agreed}, "optimizer": first, "comm": comm}
