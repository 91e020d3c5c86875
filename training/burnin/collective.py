"""Run one rank of an all-reduce whose sum is known: inside a node, or between the ranks of two nodes."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from training.burnin.devices import basis, synchronize
from training.burnin.rendezvous import FileRendezvous
from training.burnin.results import emit, outcome_of, result

ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}
TIMEOUT_S = 150
"""For ranks to find each other, as importing torch may take one of them minutes, and for a reduction that hangs. Less
than child.SILENT_S, so that the rank itself says what it waited for."""


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Places one rank. `folder` and `name`: where rank 0 publishes its store; `host`: its node's name."""

    test: str
    item: str
    rank: int
    size: int
    folder: str
    name: str
    host: str
    gpu: int | None
    seconds: float
    reports: bool


def test_all_reduce(options: RankOptions) -> None:
    """Meet the other ranks, reduce for some seconds, and check every sum.

    The rate is NCCL's bus bandwidth: 2 (n - 1) / n of the bytes in each reduction.
    """
    emit({"begin": options.test, "item": options.item})
    device = torch.device("cpu") if options.gpu is None else torch.device("cuda", options.gpu)
    if options.gpu is not None:
        torch.cuda.set_device(device)
    _join(options, device)
    values = torch.empty(ELEMENTS[device.type], dtype=torch.float32, device=device)
    size = options.size
    reductions, wrong, spent = 0, 0, 0.0
    until = time.monotonic() + options.seconds
    while _goes_on(until, device) or reductions == 0:
        values.fill_(options.rank + 1)
        synchronize(device)
        began = time.monotonic()
        dist.all_reduce(values)
        synchronize(device)
        spent += time.monotonic() - began
        reductions += 1
        wrong += int((values != size * (size + 1) / 2).sum())
    sent = 2 * (size - 1) / size * values.numel() * values.element_size() * reductions
    detail = f"{wrong:,} sums are wrong" if wrong else ""
    if options.reports or wrong:
        emit(
            result(
                options.test,
                options.item,
                outcome=outcome_of(not wrong),
                value=sent / spent / 1e9,
                unit="GB/s",
                detail=detail,
                basis=f"{basis(device)}, {size} ranks",
            )  # fmt: skip
        )
    dist.destroy_process_group()


def _join(options: RankOptions, device: torch.device) -> None:
    """Meet the other ranks at the store of rank 0, on a port that nobody has chosen beforehand."""
    tcp_store = dist.TCPStore  # type: ignore[attr-defined]  # public, but not in its list of exports
    rendezvous, timeout = FileRendezvous(Path(options.folder)), timedelta(seconds=TIMEOUT_S)
    if options.rank == 0:
        store = tcp_store(options.host, 0, options.size, is_master=True, timeout=timeout, wait_for_workers=False)
        rendezvous.publish(options.name, json.dumps([options.host, store.port]))
    else:
        address = rendezvous.wait(options.name, until=time.monotonic() + TIMEOUT_S)
        if address is None:
            raise RuntimeError(f"rank 0 was not there within {TIMEOUT_S} s")
        host, port = json.loads(address)
        store = tcp_store(host, port, options.size, is_master=False, timeout=timeout)
    if options.host == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo needs an address of the machine's own name
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=options.rank, world_size=options.size, timeout=timeout)


def _goes_on(until: float, device: torch.device) -> bool:
    """Return whether the ranks reduce again: rank 0 decides, so that all do equally many."""
    flag = torch.tensor([time.monotonic() < until], dtype=torch.int32, device=device)
    dist.broadcast(flag, src=0)
    return bool(flag.item())
