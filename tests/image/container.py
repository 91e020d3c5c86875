"""A running container: an image's files, as processes in separate namespaces see them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from portal.run.child import die_with
from tests.image.storage import buildah
from tests.waiting import until

ENTER = Path(__file__).with_name("enter.py")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SPACES = ("--mount", "--pid", "--net", "--uts", "--ipc")


@dataclass(frozen=True)
class Image:
    """An image's run configuration."""

    entrypoint: list[str]
    command: list[str]
    environment: dict[str, str]
    user: str
    folder: str
    volumes: list[str]


def inspect(name: str) -> Image:
    payload = json.loads(buildah("inspect", "--type", "image", name))["OCIv1"]["config"]
    return Image(
        entrypoint=payload.get("Entrypoint") or [],
        command=payload.get("Cmd") or [],
        environment={"PATH": PATH, **dict(line.split("=", 1) for line in payload.get("Env") or [])},
        user=payload.get("User", ""),
        folder=payload.get("WorkingDir") or "/",
        volumes=sorted(payload.get("Volumes") or {}),
    )


@dataclass(frozen=True)
class Furniture:
    """The container's options besides the command, which enter.py applies."""

    environment: dict[str, str] = field(default_factory=dict)
    mounts: Sequence[tuple[str, str, bool]] = ()
    """Source, place, read-only."""
    tmpfs: Sequence[str] = ()
    shm_size: str = "64m"
    read_only: bool = False
    without_capabilities: bool = False


class Container:
    """A container from its creation until `close`; it may be stopped and started again in between."""

    def __init__(self, name: str, image: str, log: Path) -> None:
        self.name = name
        self.image = inspect(image)
        self.id = buildah("from", "--pull=never", image).strip()
        self.root = Path(buildah("mount", self.id).strip())
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.pid = 0

    def start(self, command: Sequence[str] | None, furniture: Furniture) -> None:
        """Start the command, or the image's default, as the container's first process."""
        self.environment = {"HOME": self._home(), **self.image.environment, **furniture.environment}
        options = {
            **asdict(furniture),
            "name": self.name,
            "root": str(self.root),
            "command": [*self.image.entrypoint, *(command or self.image.command)],
            "environment": self.environment,
            "user": self.image.user,
            "folder": self.image.folder,
        }
        parent = os.getpid()
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                ["unshare", *SPACES, "--fork", "--kill-child", "--propagation=private", sys.executable, "-I", ENTER],
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=lambda: die_with(parent),
            )  # fmt: skip
        assert self.process.stdin
        self.pid = until(self._first)
        self._description = json.dumps(options).encode()

    def _home(self) -> str:
        people = [line.split(":") for line in (self.root / "etc/passwd").read_text().splitlines()]
        return next(fields[5] for fields in people if fields[0] == (self.image.user or "root"))

    def go(self) -> None:
        """Let the command run, once everything around it, such as its network, is ready."""
        assert self.process
        assert self.process.stdin
        self.process.stdin.write(self._description)
        self.process.stdin.close()

    def _first(self) -> int:
        """Return the process with pid 1 in the container."""
        assert self.process
        children = psutil.Process(self.process.pid).children()
        return int(children[0].pid) if children else 0

    @property
    def ended(self) -> int | None:
        """Return the exit status, once the container has ended."""
        assert self.process
        return self.process.poll()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container like `docker exec`: as the image's user, with the container's environment."""
        enter = ["nsenter", f"--target={self.pid}", *SPACES, "--root", "--wd", *self._identity(), "--"]
        return subprocess.run(
            [*enter, *command], env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip

    def _identity(self) -> list[str]:
        status = Path(f"/proc/{self.pid}/status").read_text()
        numbers = {line.split()[0]: line.split()[1] for line in status.splitlines() if line.startswith(("Uid", "Gid"))}
        return [f"--setuid={numbers['Uid:']}", f"--setgid={numbers['Gid:']}"]

    def stop(self, timeout_s: float = 30.0) -> int:
        """Terminate the first process like `docker stop`, and return its exit status."""
        assert self.process
        if self.ended is None:
            os.kill(self.pid, signal.SIGTERM)
        return self.process.wait(timeout_s)

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def close(self) -> None:
        if self.process and self.ended is None:
            self.process.kill()  # and with it everything inside
            self.process.wait()
        buildah("umount", self.id)
        buildah("rm", self.id)
