"""Measure what the node agent costs its machine, and how soon an Xid in the kernel log is on the machine's page.

    python -m bench.agent

The agent runs with eight GPUs of the stand-in NVML at 1 Hz and posts to a real portal. Its share of a core and its
memory are its own and its child's together, over a minute; a driver's part is not in it. An Xid's way is from the write
to the log until the socket of the machine's page hears of it, 30 times.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from bench import stage

SECONDS = 60
XIDS = 30
NODE = "dgx-01"


def main() -> int:
    print(stage.machine())
    from tests.nvml import StandIn

    with stage.site() as place, ExitStack() as stack:
        stage.django(place)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        token, bearer = _enrol(folder)
        port, _ = stack.enter_context(place.web())
        stand_in = StandIn(folder)
        log = folder / "kmsg"
        log.touch()
        environment = {
            **stand_in.environment,
            "VIGIL_AGENT_URL": f"http://127.0.0.1:{port}",
            "VIGIL_AGENT_TOKEN_FILE": str(token),
            "VIGIL_AGENT_NODE": NODE,
            "VIGIL_AGENT_STATE": str(folder / "state"),
            "VIGIL_AGENT_KMSG": str(log),
            "VIGIL_AGENT_MOUNTS": "none",
        }
        command = [sys.executable, "-P", "-m", "nodes.agent"]
        agent = stack.enter_context(stage.process(command, folder / "log", environment=environment))
        _wait_for_samples()
        core, memory = _cost(psutil.Process(agent.pid))
        late = asyncio.run(_xids(port, bearer, log))
    p95 = stage.percentile(late, 0.95)
    print(f"  an Xid: median {stage.percentile(late, 0.5):.2f} s, most {max(late):.2f} s")
    bars = {
        "core": stage.bar("agent and child", core * 100, 0.5, at_least=False, unit=" % of a core"),
        "memory": stage.bar("their memory (PSS)", memory, 40, at_least=False, unit=" MB"),
        "xid": stage.bar("an Xid to the page, p95", p95, 2, at_least=False, unit=" s", has_timers=True),
    }
    return stage.result("agent", bars=bars, core_percent=core * 100, memory_mb=memory, xid_p95_s=p95)


def _enrol(folder: Path) -> tuple[Path, str]:
    """Enrol a node and create a person; return the file with the node's token, and the person's token."""
    from nodes.telemetry.enrolment import enroll_here
    from portal.models import Token, User

    file = folder / "token"
    file.write_text(enroll_here(NODE))
    return file, Token.issue(User.objects.create_superuser("ada"), "bench")[1]


def _wait_for_samples() -> None:
    from nodes.models import Agent

    deadline = time.monotonic() + 60
    while not Agent.objects.filter(node=NODE, gpus__isnull=False).exists():
        if time.monotonic() > deadline:
            raise SystemExit("the agent tells nothing")
        time.sleep(0.2)


def _cost(agent: psutil.Process) -> tuple[float, float]:
    """Return the share of a core and the megabytes that the agent used."""
    time.sleep(5)  # what a start takes is no matter of days
    before, began = stage.cpu_seconds(agent.pid), time.perf_counter()
    time.sleep(SECONDS)
    core = (stage.cpu_seconds(agent.pid) - before) / (time.perf_counter() - began)
    every = [agent, *agent.children(recursive=True)]
    return core, sum(process.memory_full_info().pss for process in every) / 1e6


async def _xids(port: int, token: str, log: Path) -> list[float]:
    import msgspec
    import websockets

    late = []
    headers = {"Authorization": f"Bearer {token}"}
    async with websockets.connect(
        f"ws://127.0.0.1:{port}/ws/cluster?node={NODE}", additional_headers=headers
    ) as socket:
        for seq in range(XIDS):
            await asyncio.sleep(0.37 * (seq % 7))  # at any time of the agent's own ten seconds
            began = time.perf_counter()
            _write(log, seq)
            while True:
                message: dict[str, Any] = msgspec.json.decode(await asyncio.wait_for(socket.recv(), 30))
                if message.get("kind") == "happened" and "xid" in message["happened"]:
                    break
            late.append(time.perf_counter() - began)
    return late


def _write(log: Path, seq: int) -> None:
    """Write a kernel record; each has another Xid, so that none is merged into the one before."""
    now = int(1e6 * float(Path("/proc/uptime").read_text().split()[0]))
    text = f"NVRM: Xid (PCI:0000:05:00): {13 + seq}, pid=5, name=python, Ch 00000008"
    with open(os.open(log, os.O_WRONLY | os.O_APPEND), "w") as file:
        file.write(f"3,{seq},{now},-;{text}\n")


if __name__ == "__main__":
    sys.exit(main())
