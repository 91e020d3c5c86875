"""A Slurm node with GPUs, and a real agent on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from portal.run.child import die_with
from tests.nvml import StandIn
from tests.stack import REPOSITORY, Stack


class Machine:
    """A Slurm node with GPUs: NVML's GPU i is used 10 × (i + 1) % and is /dev/nvidia<minors[i]>."""

    def __init__(self, portal: Stack, folder: Path, node: str, minors: range) -> None:
        self.portal, self.folder, self.node, self.minors = portal, folder / node, node, minors
        self.folder.mkdir(exist_ok=True)  # there already where a failed test runs again
        self.folder.chmod(0o755)
        self.gpus = StandIn(self.folder)
        shutil.copy(self.gpus.library, self.folder)  # from where jobs may not go
        self.set_gpus()
        self.agent: subprocess.Popen[bytes] | None = None

    def uuid(self, minor: int) -> str:
        return f"GPU-{self.node}-{minor}"

    def percent(self, minor: int) -> int:
        return 10 * (self.minors.index(minor) + 1)

    def set_gpus(self, *lines: str) -> None:
        each = [f"{i} uuid {self.uuid(m)}\n{i} minor {m}\n{i} gpu_percent {self.percent(m)}" for i, m in
                enumerate(self.minors)]  # fmt: skip
        self.gpus.set_state(f"* count {len(self.minors)}", *each, *lines)

    @property
    def of_nvml(self) -> dict[str, str]:
        return {**self.gpus.environment, "LD_LIBRARY_PATH": str(self.folder)}

    @property
    def environment(self) -> dict[str, str]:
        return {
            **self.of_nvml,
            "VIGIL_AGENT_URL": self.portal.url,
            "VIGIL_AGENT_TOKEN_FILE": str(self.folder / "token"),
            "VIGIL_AGENT_NODE": self.node,
            "VIGIL_AGENT_STATE": str(self.folder / "state"),
            "VIGIL_AGENT_KMSG": str(self.folder / "kmsg"),
            "VIGIL_AGENT_MOUNTS": "none",
        }

    def python(self) -> str:
        """Return a Python whose programs find this machine's GPUs: a job's variables reach ranks, not launchers."""
        path, variables = self.folder / "python", " ".join(f"{name}={value}" for name, value in self.of_nvml.items())
        path.write_text(f'#!/bin/sh\nexec env {variables} {sys.executable} "$@"\n')
        path.chmod(0o755)
        return str(path)

    def start(self, token: str, **more: str) -> None:
        """Start the agent; `more`: further settings."""
        (self.folder / "token").write_text(token)
        (self.folder / "token").chmod(0o600)
        (self.folder / "kmsg").touch()
        parent = os.getpid()
        with (self.folder / "log").open("wb") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-P", "-m", "nodes.agent"], cwd=REPOSITORY, stderr=log,
                env={**os.environ, **self.environment, **more}, preexec_fn=lambda: die_with(parent),
            )  # fmt: skip

    def close(self) -> None:
        if self.agent:
            self.agent.terminate()
            self.agent.wait(30)
