"""A real `vigil up` for tests: a private home and port, its processes by name, its first sysadmin's client."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from tests.waiting import until

REPOSITORY = Path(__file__).resolve().parent.parent
UP, WEB, WORKER = ({f"{package}.{name}" for package in ("console", "portal")} for name in ("up", "web", "worker"))
NAMES = ("redis", "web", "follow", "work", "diagnose", "beat", "agent")
# Set for Django in the test process, not for the portal that it starts.
_NOT_PASSED_ON = {"DATABASE_URL", "REDIS_URL", "SECRET_KEY", "DJANGO_SETTINGS_MODULE"}


class Stack:
    """A supervised portal. `start` and `stop` may be called repeatedly: the home stays until `close`."""

    def __init__(self, prepared: Path | None = None, *, checkout: Path = REPOSITORY, **environment: str) -> None:
        """`checkout`: the tree whose code it runs."""
        self.checkout = checkout
        # Short: a unix socket's path holds about 100 characters.
        self.home = Path(tempfile.mkdtemp(prefix="vigil-up-"))
        if prepared:
            shutil.copytree(prepared, self.home, dirs_exist_ok=True)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in _NOT_PASSED_ON and not name.startswith(("VIGIL_", "TEST_", "PYTEST_"))
        }
        self.environment = {**inherited, "VIGIL_HOME": str(self.home), **environment}
        self.output = self.home / "up.out"
        self.process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    def prepare(self) -> None:
        """Create only the database and the static files, as a first start would."""
        environment = {**self.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"}
        command = self.command("manage.py", "prepare")
        subprocess.run(command, cwd=self.checkout, env=environment, check=True, capture_output=True, timeout=300)

    def command(self, *words: str) -> list[str]:
        """Return the command line of a Python program of this portal."""
        return [sys.executable, *words]

    # starting and stopping

    def start(self, *arguments: str, timeout_s: float = 180.0) -> None:
        """Start it and wait until it reports that it is ready; it uses the same port at every start."""
        self.output.write_bytes(b"")
        command = self.command("-m", self._package("up"), "--port", str(self.port), "--with-parent", *arguments)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=self.checkout, env=self.environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        until(self._is_ready, f"`vigil up` to be ready; it says: {self.output_of()}", seconds=timeout_s)

    def _package(self, process: str) -> str:
        """Return the module of one of its processes; before version 0.2 they were modules of `portal`."""
        return f"console.{process}" if (self.checkout / "console").is_dir() else f"portal.{process}"

    @property
    def _command_line(self) -> str:
        return "vigil_cli.main" if (self.checkout / "vigil_cli").is_dir() else "portal.cli.main"

    def _is_ready(self) -> bool:
        assert self.process
        if self.process.poll() is not None:
            raise AssertionError(f"`vigil up` ended with {self.process.returncode}:\n{self.output_of()}")
        return "Vigil is ready at" in self.output_of()

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 15.0) -> float:
        """Send a signal to stop it; return how many seconds that took."""
        assert self.process
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(timeout_s)
        return time.monotonic() - began

    def close(self) -> None:
        """Stop it, end the jobs that outlive it, remove its home."""
        if self.process and self.is_running:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        until(lambda: not self.processes(), "the last process to end")
        shutil.rmtree(self.home, ignore_errors=True)

    # its output

    def output_of(self) -> str:
        return self.output.read_text(errors="replace")

    def line(self, start: str) -> str:
        """Return the rest of the first line that starts with this text."""
        return next(
            line.removeprefix(start).strip() for line in self.output_of().splitlines() if line.startswith(start)
        )

    @property
    def url(self) -> str:
        return self.line("Vigil is ready at").split()[0]

    @property
    def listening_port(self) -> int:
        """Return the port that the web process listens on, whatever the public address is."""
        assert self.process
        listening = [c for c in psutil.Process(self.process.pid).net_connections("tcp") if c.status == "LISTEN"]
        return int(listening[0].laddr[1])

    @property
    def authorization(self) -> dict[str, str]:
        """Return a header with the first sysadmin's token."""
        config = tomllib.loads((self.home / "cli.toml").read_text())
        return {"Authorization": f"Bearer {config['token']}"}

    @property
    def sign_in_url(self) -> str:
        return self.line("Sign in:")

    def log(self, name: str) -> str:
        return (self.home / "logs" / f"{name}.log").read_text(errors="replace")

    # its processes

    def pid(self, name: str) -> int:
        """Return the process id of one of NAMES, or of `up` itself."""
        assert self.process
        if name == "up":
            return self.process.pid
        for child in psutil.Process(self.process.pid).children():
            if _name_of(child) == name:
                return child.pid
        raise LookupError(f"no {name} among the children of `vigil up`")

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send the signal to one of NAMES, or to `up`; return its process id."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def wait_for_new(self, name: str, old: int, timeout_s: float = 20.0) -> int:
        """Wait until the process has been started again."""

        def new_pid() -> int:
            try:
                pid = self.pid(name)
            except (LookupError, psutil.NoSuchProcess):
                return 0
            return pid if pid != old else 0

        return until(new_pid, f"a new {name}", seconds=timeout_s)

    def processes(self) -> list[psutil.Process]:
        """Return every process that belongs to this home: those of the portal and of the jobs that it started."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def job_processes(self) -> list[psutil.Process]:
        """Return the processes of jobs: watchers, launchers, ranks, shippers."""
        portal = {process.pid for process in self.portal_processes()}
        return [process for process in self.processes() if process.pid not in portal]

    def portal_processes(self) -> list[psutil.Process]:
        """Return `vigil up` and its children, alive or orphaned."""
        return [p for p in self.processes() if _name_of(p) in NAMES or UP & {*_words(p)}]

    def _owns(self, process: psutil.Process) -> bool:
        home = str(self.home)
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                return False
            # Programs that the portal or its jobs start, not somebody's `tail` of a log in this home.
            words = process.cmdline()
            started = words and Path(words[0]).name.startswith(("python", "redis", "valkey", "bash", "sh"))
            return bool(started and any(home in word for word in words)) or any(
                value.startswith(home) for value in process.environ().values()
            )
        except psutil.Error:
            return False

    # access over HTTP and the command line

    def client(self) -> httpx.Client:
        """Return a REST client of the first sysadmin, with the token that the first start stored for `vigil`."""
        # verify: plain http needs no certificate authorities, and reading them takes longer than the request.
        return httpx.Client(base_url=self.url, headers=self.authorization, timeout=30, trust_env=False, verify=False)

    def sign_in(self, browser: httpx.Client) -> None:
        """Sign in by the link that the first start printed, which works once; the client follows redirects."""
        page = browser.get(self.sign_in_url).text
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page)
        assert token, page[:2000]
        browser.post(self.sign_in_url, data={"csrfmiddlewaretoken": token[1]}).raise_for_status()
        assert "sessionid" in browser.cookies

    def vigil(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run the command line against this portal."""
        return subprocess.run(
            self.command("-m", self._command_line, *arguments), cwd=self.checkout, env=self.environment,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def free_port() -> int:
    """Return a port below those of outgoing connections, so that nobody takes it while a portal is down."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _name_of(process: psutil.Process) -> str:
    words = _words(process)
    if any("redis-server" in word or "valkey-server" in word for word in words[:1]):
        return "redis"
    if WEB & {*words}:
        return "web"
    if "beat" in words:
        return "beat"
    if "nodes.agent" in words:
        return "agent"
    return next((words[i + 1] for i, word in enumerate(words[:-1]) if word in WORKER), "")
