"""Run the agent as a real process, on prepared files and the stand-in of NVML."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.nodes.agent.portal import PortalStandIn
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[3]
PERIOD_S = 0.1


class Kmsg:
    """A plain file instead of /dev/kmsg."""

    def __init__(self, path: Path) -> None:
        self.path, self.seq = path, 0
        path.touch()

    def append(self, *texts: str, priority: int = 3) -> list[int]:
        """Append records as if the kernel had just written them; return their numbers."""
        now = int(1e6 * float(Path("/proc/uptime").read_text().split()[0]))
        numbers = [self.seq + place for place in range(len(texts))]
        lines = [f"{priority},{number},{now},-;{text}\n" for number, text in zip(numbers, texts, strict=True)]
        with open(self.path, "a") as file:
            file.write("".join(lines))
        self.seq += len(texts)
        return numbers


class Running:
    """Agents that use one node's folder, one after another."""

    def __init__(self, folder: Path, portal: PortalStandIn, environment: dict[str, str]) -> None:
        self.portal, self.state = portal, folder / "state"
        self.kmsg = Kmsg(folder / "kmsg")
        self.token_file = folder / "token"
        self.token_file.write_text(portal.token + "\n")
        self.token_file.chmod(0o600)
        self.log_file = folder / "log"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("VIGIL_")},
            "VIGIL_AGENT_URL": portal.url,
            "VIGIL_AGENT_TOKEN_FILE": str(self.token_file),
            "VIGIL_AGENT_NODE": "node01",
            "VIGIL_AGENT_STATE": str(self.state),
            "VIGIL_AGENT_KMSG": str(self.kmsg.path),
            "VIGIL_AGENT_MOUNTS": "none",
            **environment,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, period: float = PERIOD_S, **more: str) -> subprocess.Popen[bytes]:
        with open(self.log_file, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nodes.agent", "--period", str(period)],
                cwd=ROOT,
                env={**self.environment, **more},
                stderr=log,
            )
        return self.process

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run one of the agent's other commands to its end."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "nodes.agent", *words],
            cwd=ROOT,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> float:
        """Send SIGTERM and return how long the agent took to end."""
        assert self.process is not None
        began = time.monotonic()
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0, self.log
        return time.monotonic() - began

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def children(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid if self.process else 0).children()
        return []

    def reader(self) -> psutil.Process:
        """Return the child process that reads NVML."""
        return until(lambda: [child for child in self.children if "gpus.nvml" in " ".join(_command(child))])[0]

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []
