"""How the launchers of an attempt agree, by small files in its members folder: no server, no lock, no shared clock.

Each refreshes `node-<n>`. The leader (node 0) forms an incarnation once every node is there: `incarnation-<i>.json`.
Whoever sees a failure first says so: `broken-<i>.json`; then every launcher ends its ranks and leaves
`ended-<i>.<n>.json` with how they ended, and the leader decides: another incarnation, or `verdict.json`, which ends
everybody. Files appear whole and only once (link), so the first one wins.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.launch.failures import Failure
from training.launch.plan import Plan
from training.rendezvous import read_json, write_json
from vigil_report import boot_id

MEET_SECONDS = 600.0  # for every node's launcher to appear
REFRESH_SECONDS = 1.0
DEAD_SECONDS = (
    20.0  # a launcher that refreshes nothing for so long is gone; attributes on shared file systems lag seconds
)


@dataclass(frozen=True)
class Incarnation:
    """One start of all ranks, as the leader formed it."""

    number: int
    generation: int
    resume: str
    host: str  # of rank 0's node, as the other nodes reach it
    port: int  # free on that node a moment ago: for scripts, which want MASTER_PORT


class Members:
    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self._refreshed = 0.0
        self._beat = 0
        self._seen: dict[int, tuple[object, float]] = {}  # node → its last beat, and when we saw it change

    def refresh(self) -> None:
        """Say that this launcher lives."""
        now = time.monotonic()
        if self._plan.nodes == 1 or now - self._refreshed < REFRESH_SECONDS:
            return
        self._refreshed, self._beat = now, self._beat + 1
        about = {
            "node": self._plan.node,
            "host": socket.gethostname(),
            "boot_id": boot_id(),
            "pid": os.getpid(),
            "beat": self._beat,
        }
        with suppress(OSError):  # a full disk for a moment: the others are patient
            write_json(self._folder / f"node-{self._plan.node_rank}", about)

    def absent(self) -> list[int]:
        """Nodes whose launcher is not there (yet), or has stopped refreshing."""
        if self._plan.nodes == 1:
            return []
        now = time.monotonic()
        for node in range(self._plan.nodes):
            found = read_json(self._folder / f"node-{node}")
            beat = (found.get("pid"), found.get("beat")) if found else None
            if beat is not None and self._seen.get(node, (None, 0.0))[0] != beat:
                self._seen[node] = (beat, now)
        return [node for node in range(self._plan.nodes) if now - self._seen.get(node, (None, -1e9))[1] > DEAD_SECONDS]

    def leader_is_lost(self, since: float) -> bool:
        """Whether the leader has stopped refreshing, or, seconds after `since`, never appeared."""
        return 0 in self.absent() and (0 in self._seen or time.monotonic() - since > MEET_SECONDS)

    def host(self) -> str:
        """Where rank 0's node is reached by all: loopback when every launcher runs on this machine."""
        nodes = [read_json(self._folder / f"node-{node}") or {} for node in range(self._plan.nodes)]
        if self._plan.nodes == 1 or {node.get("boot_id") for node in nodes} == {boot_id()}:
            return "127.0.0.1"
        return socket.gethostname()

    def form(self, incarnation: Incarnation) -> None:
        self._once(f"incarnation-{incarnation.number}.json", asdict(incarnation))

    def formed(self, number: int) -> Incarnation | None:
        found: Any = read_json(self._folder / f"incarnation-{number}.json")
        return Incarnation(**found) if found else None

    def first_number(self) -> int:
        """The incarnation to begin with: not 0 where a launcher of this node ran before and took its ranks with it."""
        number = 0
        while self.formed(number) and (self._plan.leads or self._told(number) or self.broken(number)):
            if not self._told(number):
                lost = [Failure(self._plan.first_rank, "signal", signal=9, error="the launcher was lost")]
                self.break_off(number, reason="node")
                self.tell_ended(number, lost)
            number += 1
        return number

    def _told(self, number: int) -> bool:
        return (self._folder / f"ended-{number}.{self._plan.node_rank}.json").exists()

    def store_file(self, number: int) -> Path:
        return self._folder / f"store-{number}.json"

    def break_off(self, number: int, *, reason: str, ranks: list[int] | None = None, **more: object) -> None:
        """All ranks of this incarnation are to be ended. The first to say so is heard."""
        self._once(f"broken-{number}.json", {"reason": reason, "ranks": ranks or [], **more})

    def broken(self, number: int) -> dict[str, Any] | None:
        return read_json(self._folder / f"broken-{number}.json")

    def tell_ended(self, number: int, failures: list[Failure]) -> None:
        self._once(f"ended-{number}.{self._plan.node_rank}.json", {"failures": [asdict(f) for f in failures]})

    def ended(self, number: int) -> dict[int, list[Failure]]:
        """Nodes that have told how their ranks ended, with the failures among them."""
        told = {}
        for node in range(self._plan.nodes):
            found: Any = read_json(self._folder / f"ended-{number}.{node}.json")
            if found:
                told[node] = [Failure(**failure) for failure in found["failures"]]
        return told

    def decide(self, exit_code: int) -> None:
        self._once("verdict.json", {"exit_code": exit_code})

    def verdict(self) -> int | None:
        found: Any = read_json(self._folder / "verdict.json")
        return int(found["exit_code"]) if found else None

    def _once(self, name: str, thing: dict[str, object]) -> None:
        """Make a file appear whole, unless it is there already."""
        staging = self._folder / f".{name}.{os.getpid()}"
        staging.write_text(json.dumps(thing))
        with suppress(FileExistsError):
            os.link(staging, self._folder / name)
        staging.unlink()


def free_port() -> int:
    """A port that nobody listens on right now."""
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
