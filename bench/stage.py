"""Provide what benches share: a portal on a private Redis and database, environments for third-party software,
CPU time of processes, and the line that says what was measured."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from bench import reference
from portal.run.child import die_with
from tests.postgres import postgres
from tests.redis import redis_up

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = REPOSITORY / "var" / "bench"
# As `vigil up` starts it.
UVICORN = (
    "--ws",
    "websockets-sansio",
    "--ws-per-message-deflate",
    "false",
    "--no-access-log",
    "--log-level",
    "warning",
)


def machine() -> str:
    """Describe where and when this was measured, and how busy the machine was with other things."""
    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown CPU")
    load = os.getloadavg()[0]
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"{now}, {os.cpu_count()} × {model}, Python {platform.python_version()}, load before {load:.1f}"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def result(name: str, *, bars: dict[str, bool], **figures: Any) -> int:
    """Print the machine-readable last line and return the exit status."""
    met = all(bars.values())
    print(json.dumps({"bench": name, "met": met, "bars": bars, **figures}, default=lambda x: round(float(x), 4)))
    return 0 if met else 1


@cache
def _slowness() -> float:
    """Return how slow this machine is compared to the one on which bars were set; print it once."""
    factor = reference.slowness()
    print(f"  this machine takes {factor:.2f} times the reference's CPU time; limits of time are multiplied by that")
    return factor


def bar(
    what: str, figure: float, limit: float, *, at_least: bool = True, unit: str = "", has_timers: bool = False
) -> bool:
    """Print one bar and return whether it is met.

    Limits of time and of shares of a core are multiplied by how slow this machine is, rates are divided by it.
    `has_timers`: most of the time passes in periods and time-outs, which are no shorter on a faster machine.
    """
    if unit.strip() in {"ms", "s", "% of a core", "values/s"}:
        slowness = max(1.0, _slowness()) if has_timers else _slowness()
        limit = limit / slowness if at_least else limit * slowness
    met = figure >= limit if at_least else figure <= limit
    sign = "≥" if at_least else "≤"
    print(f"  bar: {what}: {figure:.2f}{unit} {sign} {limit:.6g}{unit}: {'met' if met else 'MISSED'}")
    return met


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def process(
    command: Sequence[object], log: Path, *, stdin: bool = False, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a child process that ends with the bench; its stdin, if any, stays open as long."""
    parent = os.getpid()
    with log.open("ab") as output:
        child = subprocess.Popen(
            [str(word) for word in command],
            cwd=REPOSITORY,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: die_with(parent),
        )
    try:
        yield child
    finally:
        if child.stdin:
            child.stdin.close()
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_for_port(port: int, child: subprocess.Popen[bytes], log: Path, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if child.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server does not come up:\n{log.read_text()[-3000:]}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process and its living children."""
    total = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


@dataclass(frozen=True)
class Site:
    """A portal's environment: a fresh home, a migrated database, Redis running, and no process of ours yet."""

    home: Path
    environment: dict[str, str]

    @contextmanager
    def web(
        self, application: str = "console.asgi:application", *, port: int = 0, **environment: str
    ) -> Iterator[tuple[int, int]]:
        """Run one uvicorn process, on any free port if none is given; yield (port, pid)."""
        port, log = port or free_port(), self.home / "web.log"
        command = [sys.executable, "-m", "uvicorn", application, "--host", "127.0.0.1", "--port", port, *UVICORN]
        with process(command, log, environment={**self.environment, **environment}) as child:
            wait_for_port(port, child, log)
            yield port, child.pid


@contextmanager
def site(database: str = "sqlite") -> Iterator[Site]:
    """Yield a site on SQLite or on a private, durable PostgreSQL."""
    with ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="vigil-bench-"))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        environment = {
            "VIGIL_HOME": str(home),
            "REDIS_URL": stack.enter_context(redis_up(home / "redis")).url,
            "DJANGO_SETTINGS_MODULE": "portal.settings",
            "VIGIL_LOG_LEVEL": "ERROR",
            "VIGIL_SOCKETS": "20000",  # one person opens all of them
        }
        if database == "postgres":
            environment["DATABASE_URL"] = stack.enter_context(postgres(durable=True))
        else:
            environment.pop("DATABASE_URL", None)
        command = [sys.executable, "manage.py", "migrate", "-v", "0"]
        subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **environment}, check=True)
        yield Site(home, environment)


def has_slurm(name: str) -> bool:
    """Return whether that release can be started here; print why not."""
    from tests.slurm import release

    try:
        release.find(name)
    except release.NoSlurm as error:
        print(f"not measured: {error}")
        return False
    return True


def django(place: Site) -> None:
    """Set Django up in this process for this site."""
    os.environ.update(place.environment)
    import django as framework

    framework.setup()


def others(name: str, *packages: str) -> Path:
    """Return the Python of a virtual environment with third-party software, created once under var/bench."""
    home = CACHE / name
    done = home / "installed.txt"
    python = home / "bin" / "python"
    if not done.exists() or done.read_text() != " ".join(packages):
        print(f"  installing {', '.join(packages)} into {home.relative_to(REPOSITORY)} (once) …", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        done.write_text(" ".join(packages))
    return python


def in_child(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the last line that `python -m module arguments` prints, parsed as JSON; print the lines before it.

    `environment`: added to this process's environment.
    """
    command = [sys.executable, "-m", module, *arguments]
    child = subprocess.Popen(
        command, cwd=REPOSITORY, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout
    last = ""
    for line in child.stdout:
        if last:
            print(last, flush=True)
        last = line.rstrip("\n")
    if child.wait():
        raise SystemExit(f"{' '.join(command)} failed: {last}")
    found: dict[str, Any] = json.loads(last)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the sorted values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 100) * len(ordered) // 100) - 1))]


def page_times(client: Any, address: str, times: int) -> tuple[float, float]:
    """Return the 95th percentile of a page's time and its median CPU time in ms, after two warm-up requests."""
    wall, cpu = [], []
    for _ in range(times + 2):
        began, began_cpu = time.perf_counter(), time.process_time()
        answer = client.get(address)
        assert answer.status_code == 200, (address, answer.status_code)
        wall.append((time.perf_counter() - began) * 1000)
        cpu.append((time.process_time() - began_cpu) * 1000)
    return percentile(wall[2:], 0.95), percentile(cpu[2:], 0.5)
