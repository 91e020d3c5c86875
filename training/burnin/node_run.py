"""Burn in one node: a cycle runs every test for a part of the time, and cycles repeat until the time is used up.

    devices      all GPUs at once, each in its own process: memory, then matrix products (CPUs where there is no GPU)
    copies       host to GPU and back, GPU to GPU
    all-reduce   among the node's GPUs
    host         mounts, memory, disk
    pairs        all-reduce with every other node, in rounds of disjoint pairs

Nodes stay in step by their pairs. The first node decides whether there is another cycle, so that none waits for a
partner that has finished; if it dies, the others continue without pairs until their time is over.
"""

from __future__ import annotations

import json
import platform
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.burnin.child import START_S, Line, TestProcess, run_children
from training.burnin.partners import Partners
from training.burnin.plan import BurnInPlan
from training.burnin.rendezvous import FileRendezvous
from training.burnin.results import ABSENT, ResultFile, result

CYCLE_S = 600.0
SHARES = {"devices": 0.4, "copies": 0.15, "all-reduce": 0.1, "host": 0.15, "pairs": 0.2}
LEADER_WAIT_S = 600.0
CPU_RANKS = 2
ENVIRONMENT = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # torch's indices are then NVML's


def address_of(node: str) -> str:
    """Return a name under which this node reaches itself and others reach it.

    Where neither the scheduler's name nor the machine's own resolves, all nodes are on this machine.
    """
    for name in (node, platform.node()):
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            continue
        return name
    return "127.0.0.1"


class NodeRun:
    """The burn-in of this node."""

    def __init__(self, run: Path, plan: BurnInPlan, node: str) -> None:
        self.plan, self.node = plan, node
        self.rendezvous = FileRendezvous(run / "job" / "meeting")
        self.partners = Partners(self.rendezvous.folder, node)
        self.results = ResultFile(run, node)
        self.deadline = time.monotonic() + plan.seconds
        self.gpus: list[int] = []
        self.has_torch = False
        self.has_leader = True

    def run(self) -> None:
        """Run cycles until the time is used up, then write the end, which shows that nothing is missing."""
        self._read_facts()
        number = 0
        while True:
            seconds = min(CYCLE_S, max(1.0, self.deadline - time.monotonic()))
            began = time.monotonic()
            self._cycle(number, seconds)
            number += 1
            if not self._continues(number, took=time.monotonic() - began):
                break
        self.results.write(result("end", "this node", value=number, unit="cycles"))
        self.results.close()

    def _read_facts(self) -> None:
        found: list[Line] = []
        run_children([self._child("facts", {}, "this node")], found.append, limit_s=START_S)
        for line in found:
            self.results.write(line)
            if line["test"] == "facts" and "gpus" in line:
                self.gpus, self.has_torch = [gpu["index"] for gpu in line["gpus"]], True

    def _cycle(self, number: int, seconds: float) -> None:
        parts = {name: share * seconds for name, share in SHARES.items()}
        if self.has_torch:
            self._run([self._device(gpu, parts["devices"]) for gpu in self._devices()], parts["devices"])
            copies = self._child("copies", {"gpus": self.gpus, "seconds": parts["copies"]}, "host")
            self._run([copies], parts["copies"])
            self._reduce_inside(parts["all-reduce"])
        options = {"mounts": self.plan.mounts, "scratch": self.plan.scratch, "seconds": parts["host"]}
        self._run([self._child("host", options, "this node")], parts["host"])
        if self.has_torch and self.has_leader:
            for round_ in range(self.plan.rounds):
                self._reduce_with_partner(number, round_, max(1.0, parts["pairs"] / self.plan.rounds))

    def _devices(self) -> list[int | None]:
        return [*self.gpus] or [None]

    def _device(self, gpu: int | None, seconds: float) -> TestProcess:
        item = "CPUs" if gpu is None else f"GPU {gpu}"
        return self._child("device", {"gpu": gpu, "item": item, "seconds": seconds}, item)

    def _reduce_inside(self, seconds: float) -> None:
        if len(self.gpus) == 1:
            return
        item = f"{len(self.gpus)} GPUs" if self.gpus else "CPUs"
        with tempfile.TemporaryDirectory(prefix="vigil-burnin-") as folder:
            self._run(
                [
                    self._child("rank", {
                        "test": "all-reduce", "item": item, "rank": rank, "size": len(self.gpus) or CPU_RANKS,
                        "folder": folder, "name": "store", "host": "127.0.0.1",
                        "gpu": self.gpus[rank] if self.gpus else None, "seconds": seconds, "reports": rank == 0,
                    }, item)
                    for rank in range(len(self.gpus) or CPU_RANKS)
                ],
                seconds,
            )  # fmt: skip

    def _reduce_with_partner(self, cycle: int, round_: int, seconds: float) -> None:
        partner = self.plan.partner_of(self.node, round_)
        if partner is None:
            return
        rendezvous = self.partners.enter_round(cycle, round_)
        count = self.partners.exchange(partner, rendezvous, str(len(self.gpus)))
        if count is None:
            detail = f"{partner} did not join the test"
            self.results.write(result("pair", partner, outcome=ABSENT, detail=detail))
            return
        gpus = min(len(self.gpus), int(count) if count.isdecimal() else 0)
        first = min(self.node, partner)
        ranks = gpus or 1
        self._run(
            [
                self._child("rank", {
                    "test": "pair", "item": partner, "rank": rank if self.node == first else ranks + rank,
                    "size": 2 * ranks, "folder": str(rendezvous.folder), "name": f"{first}.store",
                    "host": address_of(first), "gpu": self.gpus[rank] if gpus else None, "seconds": seconds,
                    "reports": rank == 0,
                }, partner)
                for rank in range(ranks)
            ],
            seconds,
        )  # fmt: skip

    def _continues(self, number: int, *, took: float) -> bool:
        """Return whether there is another cycle: one that would take half as long again past the end is not begun."""
        goes_on = self.deadline - time.monotonic() > took / 2
        if len(self.plan.nodes) == 1:
            return goes_on
        if self.node == self.plan.nodes[0]:
            self.rendezvous.publish(f"cycle.{number}", "go" if goes_on else "stop")
            return goes_on
        if self.has_leader:
            decision = self.rendezvous.wait(f"cycle.{number}", until=time.monotonic() + LEADER_WAIT_S)
            if decision is not None:
                return decision == "go"
            self.has_leader = False
        return goes_on

    def _child(self, kind: str, options: dict[str, Any], item: str) -> TestProcess:
        return TestProcess([kind, json.dumps(options)], ENVIRONMENT, item)

    def _run(self, children: Sequence[TestProcess], seconds: float) -> None:
        run_children(children, self.results.write, limit_s=START_S + 2 * seconds)
