"""Run `vigil up`: the whole portal on one machine.

It supervises Redis, web, workers and beat. It starts no training: jobs belong to the scheduler and continue whatever
happens here. Imports no Django.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from portal.run import child as supervise
from portal.run import redis as redis_server
from portal.run import signals
from portal.run.child import Child
from portal.run.heartbeat import Watch
from portal.run.preflight import (
    StartRefused,
    fingerprint,
    is_prepared,
    listen,
    load_settings,
    lock_home,
    note_owner,
)
from portal.run.probe import Probe, address_of
from vigil_core import installation

START_PATIENCE_S = 60.0
LOG_POLL_S = 1.0  # how often logs are read; a child's death wakes us at once
# A child that dies this often before anything was ready will not come up by trying again.
MAX_START_DEATHS = 4
# Redis starts in milliseconds and everything waits for it: it is never left down for longer than this.
REDIS_BACK_OFF_S = 1.0
REDIS_PING_S = 2.0
# More than the cores, because visitors want to run something besides the demo lab's own job.
DEMO_SLOTS = 2
# Processes that may know where Slurm's key is: `follow` uses it; `web` checks its mode at start and then forgets it.
NEED_KEYS = frozenset({"follow", "web"})
KEYS = ("VIGIL_SLURM_KEY_FILE", "VIGIL_SLURM_TOKEN_COMMAND")
# Reverse order of starting; together under the five seconds that a person waits for Ctrl-C.
STOP_ORDER = (
    (("beat", "agent", "demo", "work", "diagnose", "tail", "pull", "follow"), 2.4),
    (("web",), 1.4),
    (("redis",), 0.8),
)


def print_line(text: str) -> None:
    print(text, flush=True)


# -- the supervisor --------------------------------------------------------------------------------------------------


@dataclass
class Up:
    """Run one portal: start its child processes and restart those that die."""

    settings: ModuleType
    listener: socket.socket
    demo: bool = False
    children: dict[str, Child] = field(default_factory=dict)
    stop_requests: int = 0
    has_been_ready: bool = False
    _echoed: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home: Path = self.settings.VIGIL_HOME
        self.logs = self.home / "logs"
        self.logs.mkdir(mode=0o700, exist_ok=True)
        self.heartbeats = self.home / "heartbeats"
        self.heartbeats.mkdir(mode=0o700, exist_ok=True)
        self.environment = {
            "DJANGO_SETTINGS_MODULE": "portal.settings",
            "PYTHONUNBUFFERED": "1",
            "VIGIL_HOME": str(self.home),
            "PYDANTIC_DISABLE_PLUGINS": "__all__",  # searching for plugins reads every installed package's metadata
        }
        if self.demo and not self.settings.VIGIL_LOCAL_CPUS:
            slots = max(2, len(os.sched_getaffinity(0))) + DEMO_SLOTS
            self.environment["VIGIL_LOCAL_CPUS"] = str(slots)

    # starting

    def start(self) -> None:
        """Start everything, in parallel where the order allows it. Raises StartRefused if that is impossible."""
        began = time.monotonic()
        mark = fingerprint(self.settings)
        prepared = is_prepared(self.settings, mark)
        if not prepared:
            print_line("Preparing the database and static files …")
        self._start_redis()
        with self._start_web(mark) as preparing:
            # Importing Django takes most of a start: if the site is prepared already, the worker does it meanwhile.
            if prepared:
                self._start_worker("follow")
            notes = self._read_preparation(preparing)
        if not prepared:
            self._start_worker("follow")
        self._wait_until_ready()
        self._start_background()
        if self.demo:
            self._make_demo()
        self.has_been_ready = True
        url = self.settings.VIGIL_PUBLIC_URL
        print_line(f"Vigil is ready at {url} ({time.monotonic() - began:.1f} s). Data in {self.home}; Ctrl-C stops it.")
        for line in notes:
            print_line(line)

    def _start_redis(self) -> None:
        if os.environ.get("REDIS_URL") or os.environ.get("REDIS_URL_FILE"):
            if problem := redis_server.url_answers(self.settings.REDIS_URL):
                raise StartRefused(f"the Redis at REDIS_URL does not answer ({problem}): start it, or unset REDIS_URL.")
            return
        directory = self.home / "redis"
        try:
            command = redis_server.command(redis_server.find_server(), directory)
        except redis_server.NoRedis as error:
            raise StartRefused(str(error)) from None
        watch = Watch(
            self.settings.VIGIL_UNRESPONSIVE_SECONDS,
            answers=lambda: redis_server.is_alive(redis_server.socket_path(directory)),
            every_s=REDIS_PING_S,
        )
        redis = self._add("redis", command, important=None, watch=watch, longest_wait_s=REDIS_BACK_OFF_S)
        deadline = time.monotonic() + START_PATIENCE_S
        while not redis_server.answers(redis_server.socket_path(directory)):
            if time.monotonic() > deadline:
                raise StartRefused(f"Redis does not answer; its log {redis.log} ends with\n{redis.log_tail()}")
            self.run_once(0.01)

    def _start_web(self, mark: str) -> socket.socket:
        """Start web, which prepares the site first; its answer arrives on the returned socket."""
        here, there = socket.socketpair()
        web = [sys.executable, "-m", "console.web", "--fd", str(self.listener.fileno())]
        with there:
            child = self._add(
                "web",
                [*web, "--prepare", mark, "--answer", str(there.fileno())],
                pass_fds=[self.listener.fileno(), there.fileno()],
                watch=self._watch("web"),
            )
        # A restarted web process finds the site prepared, and nobody reads its answer.
        child.command, child.pass_fds = web, [self.listener.fileno()]
        return here

    def _read_preparation(self, preparing: socket.socket) -> list[str]:
        """Return the notes that web prints once the site is prepared. Raises StartRefused if it cannot be prepared."""
        preparing.setblocking(False)
        buffer = b""
        while not buffer.endswith(b"\n"):
            try:
                more = preparing.recv(65_536)
            except BlockingIOError:
                self.run_once(0.02)
                continue
            if not more:
                web = self.children["web"]
                raise StartRefused(f"web died while preparing the site; its log {web.log} ends with\n{web.log_tail()}")
            buffer += more
        answer = json.loads(buffer)
        if "refused" in answer:
            raise StartRefused(answer["refused"])
        return [str(line) for line in answer["notes"]]

    def _start_background(self) -> None:
        """Start the processes that nobody waits for; their work queues up until they run."""
        self._start_worker("work", niceness=10)  # merging and verifying must not slow what people wait for
        self._start_worker("diagnose", niceness=5)  # reads logs, sometimes gigabytes of them
        if self.settings.VIGIL_REPORTS == "tail":
            self._start_worker("tail")
        if self.settings.VIGIL_DCGM_EXPORTERS:
            self._start_worker("pull")
        if self.settings.VIGIL_AGENT:
            self._start_agent()
        (self.home / "beat").mkdir(mode=0o700, exist_ok=True)
        beat = [sys.executable, "-m", "portal.ticks", "beat", "--schedule", str(self.home / "beat" / "schedule")]
        self._add("beat", beat, niceness=10, watch=self._watch("beat"))  # a tick may come some milliseconds late

    def _start_agent(self) -> None:
        """Start this machine's own agent, so that a new site shows telemetry at once. It posts like any other agent."""
        home = self.settings.VIGIL_AGENT_HOME
        variables = {
            "URL": f"http://{address_of(self.listener)}",
            "TOKEN_FILE": str(home / "token"),
            "STATE": str(home),
        }
        environment = {f"VIGIL_AGENT_{name}": value for name, value in variables.items()}
        self._add("agent", [sys.executable, "-m", "nodes.agent"], also=environment)

    def _start_worker(self, queue: str, *, niceness: int = 0) -> None:
        worker = [sys.executable, "-m", "console.worker", queue]
        self._add(queue, worker, ready=re.compile(r" ready\."), niceness=niceness, watch=self._watch(queue))

    def _watch(self, name: str) -> Watch:
        return Watch(self.settings.VIGIL_UNRESPONSIVE_SECONDS, self.heartbeats / name)

    def _add(
        self, name: str, command: Sequence[str], *, also: Mapping[str, str] | None = None, **options: object
    ) -> Child:
        environment = {**self.environment, **(also or {})}
        if name not in NEED_KEYS:
            environment |= dict.fromkeys(KEYS, "")
        child = Child(
            name, command, self.logs / f"{name}.log", installation.ROOT, environment, **options  # type: ignore[arg-type]
        )  # fmt: skip
        self.children[name] = child
        child.start()
        return child

    def _make_demo(self) -> None:
        print_line("Creating the demo lab …")
        command = installation.manage("demo")
        demo = Child("demo", command, self.logs / "demo.log", installation.ROOT, self.environment)
        demo.start()
        try:
            while demo.is_running:
                self.run_once(0.05)
        finally:
            demo.kill()
        if demo.process and demo.process.returncode:
            raise StartRefused(f"the demo lab could not be created; its log {demo.log} ends with\n{demo.log_tail()}")
        self._add("demo", [*command, "--live"], niceness=10)  # its machines keep reporting

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_PATIENCE_S
        with Probe(self.listener) as probe:
            while not (probe.answered and all(child.is_ready for child in self.children.values())):
                if time.monotonic() > deadline:
                    late = [name for name, child in self.children.items() if not child.is_ready] or ["web"]
                    raise StartRefused(f"{late[0]} is not ready after {START_PATIENCE_S:.0f} s: see {self.logs}.")
                self.run_once(0.02)
                probe.poll()

    # running

    def run(self) -> None:
        """Keep everything alive until a stop is requested."""
        while not self.stop_requests:
            now = time.monotonic()
            waits = [child.start_again_at - now for child in self.children.values() if child.process is None]
            self.run_once(max(0.0, min([LOG_POLL_S, *waits])))

    def run_once(self, wait_s: float) -> None:
        """Wait, then handle signals, new log lines and deaths of children once."""
        signals.sleep(wait_s)
        if self.stop_requests and not self.has_been_ready:
            raise Interrupted
        for child in self.children.values():
            for line in child.read_log():
                self._echo(child, line)
            if child.process is not None and not child.is_running:
                self._handle_death(child)
            elif self.has_been_ready and child.end_if_hung():  # a start has its own timeout
                limit = self.settings.VIGIL_UNRESPONSIVE_SECONDS
                print_line(f"{child.name} did not respond for {limit:g} s and is killed (log: {child.log})")
            elif child.process is None and time.monotonic() >= child.start_again_at and not self.stop_requests:
                self._start_again(child)
            child.shorten_log()

    def _start_again(self, child: Child) -> None:
        try:
            child.start()
        except OSError as error:  # out of memory or processes
            print_line(f"{child.name} cannot be started ({error}); retrying in {child.note_death():g} s")

    def _handle_death(self, child: Child) -> None:
        how = child.how_it_ended()
        child.process = None
        if self.stop_requests:
            return
        wait = child.note_death()
        if not self.has_been_ready and child.deaths >= MAX_START_DEATHS:
            raise StartRefused(
                f"{child.name} does not start ({how}); its log {child.log} ends with\n{child.log_tail()}"
            )
        print_line(f"{child.name} {how}; restarting it in {wait:g} s (log: {child.log})")
        if child.name == "redis":
            redis_server.socket_path(self.home / "redis").unlink(missing_ok=True)

    def _echo(self, child: Child, line: str) -> None:
        """Show an important log line; after five lines a minute only that there are more."""
        now = time.monotonic()
        recent = [at for at in self._echoed.get(child.name, []) if now - at < 60]
        self._echoed[child.name] = [*recent, now][-20:]
        if len(recent) < 5:
            print_line(f"{child.name}: {line[:300]}")
        elif len(recent) == 5:
            print_line(f"{child.name}: … more in {child.log}")

    # stopping

    def request_stop(self) -> None:
        self.stop_requests += 1

    def stop(self) -> None:
        """Stop everything in reverse order, within five seconds whatever hangs."""
        self.stop_requests = max(1, self.stop_requests)
        for names, patience_s in STOP_ORDER:
            children = [self.children[name] for name in names if name in self.children]
            killed = supervise.stop(children, 0.0 if self.stop_requests > 1 else patience_s)
            if killed and self.stop_requests == 1:
                print_line(f"{' and '.join(killed)} did not stop in {patience_s:g} s and had to be killed.")


class Interrupted(Exception):
    """Raised when a stop is requested before everything was up."""


# -- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("vigil up", description="Run the portal on this machine until Ctrl-C.")
    parser.add_argument("--demo", action="store_true", help="add a demo lab to explore")
    parser.add_argument("--host", default=os.environ.get("VIGIL_HOST", "127.0.0.1"), help="address to listen on")
    parser.add_argument(
        "--port", default=os.environ.get("VIGIL_PORT") or "8000", help="port to listen on; 0 takes any free one"
    )
    parser.add_argument("--with-parent", action="store_true", help="stop when the process that started this one ends")
    options = parser.parse_args(arguments)
    if options.with_parent:
        supervise.die_with(os.getppid(), signal.SIGTERM)
    os.umask(0o027)  # database, logs and uploads are private
    try:
        return _run(options)
    except StartRefused as error:
        print(f"vigil up: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    if not options.port.isdecimal() or int(options.port) > 65535:
        raise StartRefused(f"{options.port!r} is not a port: VIGIL_PORT is a number from 1024 to 65535.")
    if options.port == "0":  # bound before the settings are read, as they contain the port
        listener = listen(options.host, 0)
        settings = load_settings(listener.getsockname()[1])
        with lock_home(settings.VIGIL_HOME):
            return _supervise(Up(settings, listener, demo=options.demo))
    settings = load_settings(int(options.port))
    with lock_home(settings.VIGIL_HOME):
        return _supervise(Up(settings, listen(options.host, int(options.port)), demo=options.demo))


def _supervise(up: Up) -> int:
    signals.handle(up.request_stop)
    note_owner(up.home, up.settings.VIGIL_PUBLIC_URL)
    began = 0.0
    try:
        up.start()
        up.run()
    except Interrupted:
        pass
    finally:
        began = time.monotonic()
        up.stop()
    print_line(f"Vigil has stopped ({time.monotonic() - began:.1f} s). Running jobs continue.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
