"""Time an Xid from the kernel log of a node to its drain in Slurm, with VIGIL_HEALTH=act.

    python -m bench.drain_latency [--release 24.11] [--repeat 24]

A whole portal (`vigil up`) on a private Slurm, and a real agent on each of two nodes, over a stand-in for NVML. A line
with Xid 79 appended to the agent's kernel log starts the clock; slurmctld's own log, which says when the reason was
set, stops it. Between two drains a sysadmin clears the finding, Vigil undrains the node, and the limit of drains per
hour is lifted by moving past orders back. The kernel log is a plain file, which the agent reads every 0.2 s; /dev/kmsg
wakes it. Bar: p95 ≤ 5 s.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from bench import NOT_MEASURED, stage

BAR_S = 5.0
NODES = 10
"""Of fewer than five nodes Vigil takes none out of service by itself: 20 % of a partition is the limit."""
LOG = "slurmctld.times.log"
_REASON = re.compile(r"^\[([^]]+)\] update_node: node (\S+) reason set to: (.*)$", re.M)
_AGE_ORDERS = """
from datetime import timedelta
from django.db.models import F
from nodes.models import NodeOrder
day = timedelta(days=1)
NodeOrder.objects.update(asked_at=F("asked_at") - day)
"""
_READ_TIMES = """
import json
from nodes.models import HealthEntry
entry = HealthEntry.objects.exclude(order=None).select_related("order").earliest("-pk")
print(json.dumps([entry.opened_at.timestamp(), entry.order.asked_at.timestamp(), entry.order.ended_at.timestamp()]))
"""


@dataclass(frozen=True)
class DrainTimes:
    """Seconds from the kernel's line to each stage of one drain."""

    judged: float
    ordered: float
    drained: float
    recorded: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.drain_latency")
    parser.add_argument("--release", default="24.11", choices=["24.11", "26.05"])
    parser.add_argument("--repeat", type=int, default=24)
    options = parser.parse_args()
    if not stage.has_slurm(options.release):
        return NOT_MEASURED
    print(stage.machine())
    with _lab(options.release) as lab:
        drains = [lab.drain(number) for number in range(options.repeat)]
    for field in fields(DrainTimes):
        seconds = [getattr(drain, field.name) for drain in drains]
        p95 = stage.percentile(seconds, 0.95)
        print(
            f"  {field.name:>8}: median {statistics.median(seconds):.2f} s, p95 {p95:.2f} s, most {max(seconds):.2f} s"
        )
    late = [drain.drained for drain in drains]
    p50, p95 = statistics.median(late), stage.percentile(late, 0.95)
    what = f"Slurm {options.release}, Xid to drained, p95"
    bars = {"p95": stage.bar(what, p95, BAR_S, at_least=False, unit=" s", has_timers=True)}
    return stage.result("drain_latency", bars=bars, release=options.release, repeat=len(late), p95_s=p95, p50_s=p50)


class _Lab:
    """Two nodes with agents, and the portal that drains them."""

    def __init__(self, slurm: Any, portal: Any, machines: Sequence[Any]) -> None:
        self._slurm, self._portal, self._machines = slurm, portal, machines
        self._sysadmin = portal.client()
        self._log = slurm.layout.folder / "log" / LOG

    def drain(self, number: int) -> DrainTimes:
        """Let one node's GPU fall off the bus; return how long each stage took."""
        machine = self._machines[number % len(self._machines)]
        self._wait(lambda: self._state(machine.node) == "IDLE", f"{machine.node} to be idle")
        self._django(_AGE_ORDERS)
        before = len(self._reasons(machine.node))
        wall = time.time()
        write_xid(machine.folder / "kmsg", number)
        self._wait(lambda: len(self._reasons(machine.node)) > before, "the drain")
        drained = self._reasons(machine.node)[before]
        (entry,) = self._wait(lambda: self._entries(machine.node, "done"), "the order to be recorded")
        opened, ordered, recorded = json.loads(self._django(_READ_TIMES))
        self._post(f"health/{entry['id']}/clear")
        return DrainTimes(opened - wall, ordered - wall, drained - wall, recorded - wall)

    def _reasons(self, node: str) -> list[float]:
        """Return when Slurm set the reason of this node by our rule."""
        text = self._log.read_text()
        return [
            datetime.fromisoformat(at).timestamp()
            for at, name, reason in _REASON.findall(text)
            if name == node and "vigil: off-bus" in reason
        ]

    def _entries(self, node: str, order: str) -> list[dict[str, Any]]:
        items = self._sysadmin.get("/api/v1/health", params={"node": node, "rule": "off-bus"}).json()["items"]
        return [item for item in items if (item["order"] or {}).get("state") == order]

    def _state(self, node: str) -> str:
        return next(iter(re.findall(r"State=(\S+)", self._slurm.run("scontrol", "show", "node", node))), "")

    def _post(self, path: str) -> None:
        answer = self._sysadmin.post(f"/api/v1/{path}", json={"reason": "measured"})
        assert answer.status_code < 300, answer.text

    def _django(self, program: str) -> str:
        done = subprocess.run(
            self._portal.command("-c", f"import django; django.setup()\n{program}"), cwd=stage.REPOSITORY, text=True,
            check=True, stdout=subprocess.PIPE,
            env={**self._portal.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"},
        )  # fmt: skip
        return done.stdout

    def _wait(self, condition: Any, what: str) -> Any:
        from tests.waiting import until

        return until(condition, what, at_most_s=0.2)


@contextmanager
def _lab(release: str) -> Iterator[_Lab]:
    from tests.slurm.cluster import cluster
    from tests.slurm.machine import Machine
    from tests.slurm.portal import Portal

    with ExitStack() as stack:
        slurm = stack.enter_context(cluster(release, nodes=NODES))
        with slurm.layout.slurm_conf.open("a") as conf:
            conf.write(f"SlurmctldLogFile={slurm.layout.folder}/log/{LOG}\n")
        slurm.run("scontrol", "reconfigure")
        portal = Portal(slurm, VIGIL_HEALTH="act", VIGIL_AGENT="no")
        stack.callback(portal.close)
        portal.start(timeout_s=240.0)
        folder = Path(tempfile.mkdtemp(prefix="vigil-drain-", dir=slurm.layout.scratch))
        machines = [Machine(portal, folder, node, range(8)) for node in ("dgx01", "dgx02")]
        with portal.client() as sysadmin:
            for machine in machines:
                machine.start(sysadmin.post(f"/api/v1/nodes/{machine.node}/token").json()["token"])
                stack.callback(machine.close)
                _await_gpus(sysadmin, machine.node)
        yield _Lab(slurm, portal, machines)


def _await_gpus(sysadmin: Any, node: str) -> None:
    from tests.waiting import until

    def are_listed() -> bool:
        answer = sysadmin.get(f"/api/v1/nodes/{node}/gpus")
        return answer.status_code == 200 and len(answer.json()["items"]) == 8

    until(are_listed, f"the GPUs of {node}")


def write_xid(kernel_log: Path, number: int) -> None:
    """Append a record as the kernel writes it: each is another process's."""
    from tests.nvml import bus

    address = bus(0).removeprefix("0000").lower().rpartition(".")[0]
    now = int(1e6 * float(Path("/proc/uptime").read_text().split()[0]))
    text = f"NVRM: Xid (PCI:{address}): 79, pid={41_000 + number}, name=python, GPU has fallen off the bus."
    with kernel_log.open("a") as log:
        log.write(f"3,{number + 1},{now},-;{text}\n")


if __name__ == "__main__":
    sys.exit(main())
