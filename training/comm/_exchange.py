"""What replicas send each other to stay, or become again, one model; each module of training/comm makes one Exchange.

Bytes are what one rank sends by the usual algorithms (Patarasuk & Yuan, 2009, doi 10.1016/j.jpdc.2008.09.002): a ring
all-reduce of B bytes over n ranks sends 2·(n − 1)/n·B, a ring all-gather of B from each (n − 1)·B. The few bytes by
which ranks agree on stopping, and on a norm, are not counted.
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
"""A tree of tensors, as checkpoints hold it."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The replicas that exchange, and of what."""

    group: dist.ProcessGroup | None
    """None where nothing lies along `dp`, so that there is nothing to exchange."""
    steps: int
    """Steps of the whole run."""
    parameters: Mapping[str, nn.Parameter]
    """Those that are trained, by their names in the whole model."""
    frozen: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """The others: never exchanged, but where each rank holds a part they are gathered all the same."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """Numbers of the model that are not trained, such as running means."""
    shape: Shape
    parallelism: str = "ddp"
    options: Mapping[str, Any] = field(default_factory=dict)
    """The parallelism's."""

    @property
    def count(self) -> int:
        return self.group.size() if self.group else 1

    @property
    def index(self) -> int:
        return self.group.rank() if self.group else 0


class Exchange:
    """Leaves it to the parallelism. What a subclass keeps from step to step is its state, and lies under "comm"."""

    is_apart = False
    """Replicas take steps of their own and differ in between, so the parallelism must not average their gradients."""
    bucket_mib: float | None = None
    """What gradients must be reduced in; None: as the parallelism does."""

    def attach(self, model: nn.Module) -> None:
        """Takes part from now on. `model` is what the training loop calls."""

    def begin(self) -> None:
        """Forgets the pass that is thrown away at every start."""

    def step(self, number: int, skipped: Tensor | None = None, frozen: Tensor | None = None) -> None:
        """Follows the optimizer's `number`-th step. `skipped`: 1 if it left the parameters alone, else 0; `frozen`: 1
        if they have to stay what they are, since a step that was not finite will be done again. Scalars on the
        device."""

    def communicated(self, micro_batches: int) -> float | None:
        """Bytes that this rank has sent since it was asked last, one step of so many passes; None: not known."""
        return None

    def state(self) -> State:
        """The very tensors, to save or to read into; a rank's own under a name with its index in it."""
        return {}

    def recall(self) -> None:
        """Takes note that a checkpoint has been read into `state`."""

    def saved(self, model: State, optimizer: State) -> State:
        """What a checkpoint holds of this rank."""
        return {"model": model, "optimizer": optimizer, "comm": self.state()}

    def restore(self, read: Callable[[State], None], model: State, optimizer: State) -> None:
        """Reads what `saved` gave, perhaps of another number of replicas, or of another exchange."""
        read({"model": model, "optimizer": optimizer, "comm": self.state()})
        self.recall()


class Hook(Exchange):
    """Sends each bucket of gradients in its own way (a hook of DistributedDataParallel). One replica sends nothing."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in peers.parameters.items()}
        self._sent = 0.0

    def attach(self, model: nn.Module) -> None:
        if self.peers.count > 1:
            # torch reads a hook's annotations, and takes no strings; a lambda has none.
            model.register_comm_hook(None, lambda _, bucket: self.send(bucket))  # type: ignore[operator]

    def send(self, bucket: GradBucket) -> Future[Tensor]:
        """The mean over the replicas in the bucket's own memory, once the future is there."""
        raise NotImplementedError

    def communicated(self, micro_batches: int) -> float:
        sent, self._sent = self._sent, 0.0
        return sent

    def begin(self) -> None:
        self._sent = 0.0

    def names(self, bucket: GradBucket) -> list[str]:
        """The names of the parameters whose gradients lie in the bucket, in their order."""
        return [self._names[parameter] for parameter in bucket.parameters()]

    def count_all_reduce(self, sent: float) -> None:
        self._sent += all_reduced(sent, self.peers.count)

    def count_all_gather(self, sent: float) -> None:
        self._sent += gathered(sent, self.peers.count)


def all_reduced(sent: float, ranks: int) -> float:
    """Bytes that each rank sends in an all-reduce of so many."""
    return 2 * (ranks - 1) / ranks * sent


def gathered(sent: float, ranks: int) -> float:
    """Bytes that each rank sends in an all-gather, to which each brings so many."""
    return (ranks - 1) * sent


def mean(tensor: Tensor, peers: Peers) -> Future[Tensor]:
    """Over all replicas, in place."""
    tensor /= peers.count
    future = dist.all_reduce(tensor, group=peers.group, async_op=True).get_future()
    found: Future[Tensor] = future.then(lambda done: done.value()[0])
    return found


@torch.no_grad()
def broadcast(tensors: list[Tensor], peers: Peers, *, of: int = 0) -> None:
    """One replica's values to all, as a rule the first one's."""
    if peers.count > 1:
        for tensor in tensors:
            dist.broadcast(tensor, group=peers.group, group_src=of)
