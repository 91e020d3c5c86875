"""The site's private network: a bridge in its own namespace, and one port of this machine that leads there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from portal.run.child import die_with
from tests.image.storage import run

PUBLISH = Path(__file__).with_name("publish.py")
PREFIX = "10.88.0"


class Network:
    """A bridge, the containers on it by name, and the files by which they resolve each other."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.addresses = {name: f"{PREFIX}.{number}" for number, name in enumerate(names, start=2)}
        self.hosts = folder / "hosts"
        lines = [f"{address} {name}" for name, address in {"localhost": "127.0.0.1", **self.addresses}.items()]
        self.hosts.write_text("\n".join(lines) + "\n")
        self.keeper = _start(["unshare", "--net", "--", "sh", "-c", "echo ready; exec sleep infinity"])
        assert self.keeper.stdout
        assert self.keeper.stdout.readline() == b"ready\n"
        self._within("ip", "link", "add", "bridge", "type", "bridge")
        self._within("ip", "address", "add", f"{PREFIX}.1/24", "dev", "bridge")
        self._within("ip", "link", "set", "bridge", "up")
        self.published: list[subprocess.Popen[bytes]] = []

    def join(self, name: str, pid: int) -> None:
        """Connect a container to the bridge; the connection ends with the container."""
        here = self.addresses[name].replace(".", "-")
        # The same one after a restart, as an engine's: others remember it.
        mac = "02:42:0a:58:00:{:02x}".format(int(self.addresses[name].rpartition(".")[2]))
        add = f"ip link add v{here} type veth peer name eth0 address {mac} netns {pid}"
        # Of a container that has just ended the old one may still be there for a moment.
        self._within("sh", "-c", f"ip link delete v{here} 2>/dev/null; exec {add}")
        self._within("ip", "link", "set", f"v{here}", "master", "bridge", "up")
        there = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip"]
        run(*there, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run(*there, "link", "set", device, "up")

    def publish(self, name: str, port: int, on: str) -> None:
        """Forward an address of this machine to a container's port."""
        address, _, host_port = on.rpartition(":")
        words = [sys.executable, "-I", str(PUBLISH), address, host_port, f"/proc/{self.keeper.pid}/ns/net"]
        relay = _start([*words, self.addresses[name], str(port)])
        assert relay.stdout
        assert relay.stdout.readline() == b"ready\n"
        self.published.append(relay)

    def close(self) -> None:
        for process in (*self.published, self.keeper):
            process.kill()
            process.communicate()

    def _within(self, *command: str) -> None:
        run("nsenter", f"--net=/proc/{self.keeper.pid}/ns/net", *command)


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, preexec_fn=lambda: die_with(parent)
    )
