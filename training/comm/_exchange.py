"""Define what replicas send each other to stay or become identical; training/comm has one Exchange per module.

Bytes are those that one rank sends with the usual algorithms (Patarasuk & Yuan, 2009, doi
10.1016/j.jpdc.2008.09.002): a ring all-reduce of B bytes over n ranks sends 2·(n − 1)/n·B, a ring all-gather of B
from each (n − 1)·B. The few bytes with which ranks agree on stopping, and on a norm, are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from training.config.shape import Shape

State = dict[str, Any]
"""A tree of tensors, as in checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The replicas that exchange, and what they exchange."""

    group: dist.ProcessGroup | None
    """None if there is a single replica along `dp`, so that there is nothing to exchange."""
    steps: int
    """Steps of the whole run."""
    parameters: Mapping[str, nn.Parameter]
    """Trained parameters, by their names in the whole model."""
    frozen: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """The others: never exchanged, but gathered where each rank has a part."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """Numbers of the model that are not trained, such as running means."""
    shape: Shape
    parallelism: str = "ddp"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the parallelism."""

    @property
    def count(self) -> int:
        return self.group.size() if self.group else 1

    @property
    def index(self) -> int:
        return self.group.rank() if self.group else 0


class Exchange:
    """Leaves the exchange to the parallelism. State that a subclass keeps between steps is saved under "comm"."""

    has_independent_replicas = False
    """Whether replicas take independent steps and differ in between, so that their gradients must not be averaged."""
    bucket_mib: float | None = None
    """Bucket size in which gradients must be reduced; None: the parallelism's."""

    def attach(self, model: nn.Module) -> None:
        """Start taking part. `model` is what the training loop calls."""

    def begin(self) -> None:
        """Reset the state after the pass that is discarded at every start."""

    def step(self, number: int, skipped: Tensor | None = None, frozen: Tensor | None = None) -> None:
        """Follow the optimizer's `number`-th step. Arguments are scalars on the device.

        `skipped`: 1 if it left the parameters unchanged, else 0; `frozen`: 1 if they must not change because a step
        that was not finite will be repeated.
        """

    def sent_bytes(self, micro_batches: int) -> float | None:
        """Return the bytes sent since the last call, for a step of `micro_batches` passes; None if unknown."""
        return None

    def state(self) -> State:
        """Return the tensors themselves, to save or to read into; those of one rank under a name with its index."""
        return {}

    def on_restored(self) -> None:
        """Handle that a checkpoint has been read into `state`."""

    def saved(self, model: State, optimizer: State) -> State:
        """Return what a checkpoint saves of this rank."""
        return {"model": model, "optimizer": optimizer, "comm": self.state()}

    def restore(self, read: Callable[[State], None], model: State, optimizer: State) -> None:
        """Read what `saved` returned, perhaps with another number of replicas or another exchange."""
        read({"model": model, "optimizer": optimizer, "comm": self.state()})
        self.on_restored()


class HookExchange(Exchange):
    """Sends each bucket of gradients in its own way (a hook of DistributedDataParallel).

    A single replica sends nothing.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in peers.parameters.items()}
        self._sent = 0.0

    def attach(self, model: nn.Module) -> None:
        if self.peers.count > 1:
            # torch checks a hook's annotations and accepts no strings; a lambda has none.
            model.register_comm_hook(None, lambda _, bucket: self.send(bucket))  # type: ignore[operator]

    def send(self, bucket: GradBucket) -> Future[Tensor]:
        """Return a future; once it is done, the bucket's memory has the mean over the replicas."""
        raise NotImplementedError

    def sent_bytes(self, micro_batches: int) -> float:
        sent, self._sent = self._sent, 0.0
        return sent

    def begin(self) -> None:
        self._sent = 0.0

    def names(self, bucket: GradBucket) -> list[str]:
        """Return the names of the parameters whose gradients are in the bucket, in order."""
        return [self._names[parameter] for parameter in bucket.parameters()]

    def count_all_reduce(self, sent: float) -> None:
        self._sent += all_reduce_bytes(sent, self.peers.count)

    def count_all_gather(self, sent: float) -> None:
        self._sent += all_gather_bytes(sent, self.peers.count)


def all_reduce_bytes(sent: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-reduce of `sent` bytes."""
    return 2 * (ranks - 1) / ranks * sent


def all_gather_bytes(sent: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-gather with `sent` bytes from each."""
    return (ranks - 1) * sent


def average(tensor: Tensor, peers: Peers) -> Future[Tensor]:
    """Average over all replicas, in place."""
    tensor /= peers.count
    future = dist.all_reduce(tensor, group=peers.group, async_op=True).get_future()
    result: Future[Tensor] = future.then(lambda done: done.value()[0])
    return result


@torch.no_grad()
def broadcast(tensors: list[Tensor], peers: Peers, *, source: int = 0) -> None:
    """Copy the values of one replica, by default the first, to all."""
    if peers.count > 1:
        for tensor in tensors:
            dist.broadcast(tensor, group=peers.group, group_src=source)
