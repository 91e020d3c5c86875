"""The ranks of a run: how they meet, and the few things they agree on outside the model's own collectives."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from training.attempt.rendezvous import bind_host, publish_store, store_address
from training.config.base import ConfigError, Problem
from training.runtime import devices

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""A collective's limit. Long: a stuck rank is the watchdog's business, which knows the phase and kills from outside."""


@dataclass(frozen=True)
class World:
    """This process among the ranks. One rank alone is a world, too: every path is the same."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Rank 0 writes what is written once."""
        return self.rank == 0


def join(*, on_cpu: bool = False) -> World:
    """Meets the other ranks: where Vigil's launcher says, as torchrun says, or nobody."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = devices.own(on_cpu=on_cpu)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size:
        # Otherwise gloo listens on whatever this machine's name resolves to, which may be nothing.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    elif "VIGIL_STORE_FILE" in os.environ:
        dist.init_process_group(backend, store=_store(rank, size), rank=rank, world_size=size, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, timeout=TIMEOUT)
    return World(rank, size, device)


def wake(*, on_cpu: bool = False) -> None:
    """Readies the rank's GPU, which may take longer than meeting the others is allowed to."""
    device = devices.own(on_cpu=on_cpu)
    if device.type == "cuda":
        torch.zeros(1, device=device)


def check_devices(world: World, *, gpus_per_node: int) -> None:
    """All ranks of a run that does not want CPUs call; ConfigError on all of them if one has no GPU that should.

    Never before they have met: whoever ends alone leaves the others waiting, and its reason is taken for theirs.
    """
    if problem := devices.problem(gather(world, devices.look(world.device)), gpus_per_node=gpus_per_node):
        gather(world, None)  # nobody leaves before all know: the first to leave takes the others down
        raise ConfigError([Problem("resources.gpus_per_node", problem)])


def leave() -> None:
    with suppress(Exception):  # the work is done; a peer that left first is no failure
        dist.destroy_process_group()


def broadcast(world: World, value: Any) -> Any:
    """Rank 0's value on every rank. Small plain things only."""
    holder: list[Any] = [value]
    if world.size > 1:
        dist.broadcast_object_list(holder, src=0, device=torch.device("cpu"))
    return holder[0]


def from_first(world: World, make: Callable[[], T]) -> T:
    """Return what rank 0 makes, a small plain thing, on every rank.

    Where it fails, rank 0 alone raises, so that its traceback is the only one: the others end as it leaves them.
    """
    return cast(T, broadcast(world, make() if world.leads else None))


def gather(world: World, value: Any) -> list[Any]:
    """Every rank's value, by rank, on every rank. Small plain things only."""
    values: list[Any] = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value)
    return values


def together(world: World, act: Callable[[], Any], *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Does something on every rank and gathers the answers, small plain things; where one failed, all raise.

    `group`: the caller's own, where it is on another thread than training's collectives.
    """
    try:
        mine: tuple[Any, BaseException | None] = (act(), None)
    except Exception as error:
        mine = (None, error)
    answers: list[Any] = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(answers, mine, group=group)
    for _, failed in answers:
        if failed is not None:
            raise failed
    return [answer for answer, _ in answers]


def sum_over_ranks(world: World, values: torch.Tensor) -> torch.Tensor:
    if world.size > 1:
        dist.all_reduce(values)
    return values


class Agreed(NamedTuple):
    """What all ranks know at a step's boundary."""

    stop: bool
    """Some rank was asked to stop."""
    saving: bool
    """Some rank was still writing a checkpoint when the step began."""
    due: bool
    """Rank 0 finds that a checkpoint is due now."""
    trouble: bool = False
    """Some rank's guards want the run to end (training.guards.guards)."""


class Agreement:
    """What the ranks decide together at every step boundary: one small reduction, begun with the step, read at its end.

    It runs on the host beside the step's own work, so a GPU is never waited for. A flag counts once any rank has
    raised it, and all ranks see it at the same boundary.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._own = Agreed(False, False, False)
        self._flags = torch.tensor(self._own, dtype=torch.int32)
        self._work: dist.Work | None = None

    def begin(self, *, stop: bool, saving: bool, due: bool, trouble: bool = False) -> None:
        self._own = Agreed(stop, saving, due, trouble)
        if self._world.size > 1:
            self._flags = torch.tensor(self._own, dtype=torch.int32)
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, async_op=True)

    def end(self) -> Agreed:
        if self._work is None:
            return self._own
        self._work.wait()
        self._work = None
        return Agreed(*map(bool, self._flags.tolist()))

    def now(self, *, stop: bool = False, trouble: bool = False) -> Agreed:
        self.begin(stop=stop, saving=False, due=False, trouble=trouble)
        return self.end()


def _store(rank: int, size: int) -> Store:
    """A new store for each incarnation, on a port that nobody chose beforehand."""
    if rank == 0:
        store = TCPStore(bind_host(), 0, size, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        publish_store(store.port)
        return store
    host, port = store_address()
    return TCPStore(host, port, size, is_master=False, timeout=TIMEOUT)
