"""The ranks of a run: how they meet, and what they agree on besides the model's own collectives."""

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
"""Time limit of a collective. Long, as the watchdog handles stuck ranks: it knows the phase and kills from outside."""


@dataclass(frozen=True)
class World:
    """This process among the ranks. Even a single rank is a world, so that all code paths are the same."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which does everything that is done once."""
        return self.rank == 0


def join(*, on_cpu: bool = False) -> World:
    """Meet the other ranks: as Vigil's launcher or torchrun says, or alone."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = devices.select(on_cpu=on_cpu)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size:
        # Otherwise gloo listens on the address that this machine's name resolves to, if any.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    elif "VIGIL_STORE_FILE" in os.environ:
        dist.init_process_group(backend, store=_store(rank, size), rank=rank, world_size=size, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, timeout=TIMEOUT)
    return World(rank, size, device)


def initialise_gpu(*, on_cpu: bool = False) -> None:
    """Initialise the rank's GPU, which may take longer than the time limit for meeting the others."""
    device = devices.select(on_cpu=on_cpu)
    if device.type == "cuda":
        torch.zeros(1, device=device)


def check_devices(world: World, *, gpus_per_node: int) -> None:
    """Check that every rank has a GPU if it should; all ranks call, and all raise ConfigError if one has none.

    Never call it before they have met: a rank that ends alone leaves the others waiting, and its error would be
    attributed to them.
    """
    if problem := devices.problem(gather(world, devices.describe(world.device)), gpus_per_node=gpus_per_node):
        gather(world, None)  # all ranks must know before any leaves: the first to leave takes the others down
        raise ConfigError([Problem("resources.gpus_per_node", problem)])


def leave() -> None:
    with suppress(Exception):  # the work is done; a peer that left first is not a failure
        dist.destroy_process_group()


def broadcast(world: World, value: Any) -> Any:
    """Return rank 0's value on every rank. Small plain values only."""
    holder: list[Any] = [value]
    if world.size > 1:
        dist.broadcast_object_list(holder, src=0, device=torch.device("cpu"))
    return holder[0]


def from_rank_0(world: World, make: Callable[[], T]) -> T:
    """Return what rank 0 makes, a small plain value, on every rank.

    If it fails, rank 0 alone raises, so that its traceback is the only one: the others end when it leaves.
    """
    return cast(T, broadcast(world, make() if world.leads else None))


def gather(world: World, value: Any) -> list[Any]:
    """Return every rank's value, by rank, on every rank. Small plain values only."""
    values: list[Any] = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value)
    return values


def run_on_all(world: World, act: Callable[[], Any], *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Run a function on every rank and return all results, small plain values; if one fails, all raise.

    `group`: the caller's own group, if it is on another thread than training's collectives.
    """
    try:
        own_result: tuple[Any, BaseException | None] = (act(), None)
    except Exception as error:
        own_result = (None, error)
    results: list[Any] = [own_result] * world.size
    if world.size > 1:
        dist.all_gather_object(results, own_result, group=group)
    for _, failed in results:
        if failed is not None:
            raise failed
    return [result for result, _ in results]


def sum_over_ranks(world: World, values: torch.Tensor) -> torch.Tensor:
    if world.size > 1:
        dist.all_reduce(values)
    return values


class StepFlags(NamedTuple):
    """What all ranks know at a step boundary."""

    stop: bool
    """Whether some rank was asked to stop."""
    saving: bool
    """Whether some rank was still writing a checkpoint when the step began."""
    due: bool
    """Whether a checkpoint is due now, as decided by rank 0."""
    trouble: bool = False
    """Whether some rank's guards want the run to end (training.guards.guards)."""


class Agreement:
    """Exchanges flags of all ranks at every step boundary: one small reduction, begun with the step, read at its end.

    It runs on the host in parallel to the step, so it never waits for a GPU. A flag counts once any rank has raised
    it, and all ranks see it at the same boundary.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._own_flags = StepFlags(False, False, False)
        self._flags = torch.tensor(self._own_flags, dtype=torch.int32)
        self._work: dist.Work | None = None

    def begin(self, *, stop: bool, saving: bool, due: bool, trouble: bool = False) -> None:
        self._own_flags = StepFlags(stop, saving, due, trouble)
        if self._world.size > 1:
            self._flags = torch.tensor(self._own_flags, dtype=torch.int32)
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, async_op=True)

    def end(self) -> StepFlags:
        if self._work is None:
            return self._own_flags
        self._work.wait()
        self._work = None
        return StepFlags(*map(bool, self._flags.tolist()))

    def now(self, *, stop: bool = False, trouble: bool = False) -> StepFlags:
        self.begin(stop=stop, saving=False, due=False, trouble=trouble)
        return self.end()


def _store(rank: int, size: int) -> Store:
    """Create a new store for each incarnation, on a port that was not chosen beforehand."""
    if rank == 0:
        store = TCPStore(bind_host(), 0, size, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        publish_store(store.port)
        return store
    host, port = store_address()
    return TCPStore(host, port, size, is_master=False, timeout=TIMEOUT)
