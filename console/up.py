"""`vigil up`: the whole portal on one machine. It supervises Redis, web, workers and beat, and starts no training:
jobs belong to the scheduler and go on whatever happens here. Imports no Django."""

from __future__ import annotations

import argparse
import json
import os
import re
import select
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
from portal.run.child import Child
from portal.run.heartbeat import Watch
from portal.run.preflight import (
    Refused,
    fingerprint,
    is_prepared,
    listen,
    load_settings,
    note_owner,
    one_a_home,
)
from portal.run.probe import Probe, address_of
from vigil_core import installation

START_PATIENCE_S = 60.0
LOOK_S = 1.0  # how often logs are read; a death wakes us at once
# A child that dies this often before anything was ready will not come up by trying again.
HOPELESS_AFTER = 4
# Redis starts in milliseconds and everything waits for it: it is never left down for longer than this.
REDIS_BACK_OFF_S = 1.0
REDIS_PING_S = 2.0
# Beyond the cores, for what the demonstration lab runs: whoever looks around wants to run something, too.
DEMO_SLOTS = 2
# Who may know where Slurm's key is: who speaks with Slurm, and who looks at its mode before serving, to forget it then.
NEED_KEYS = frozenset({"follow", "web"})
KEYS = ("VIGIL_SLURM_KEY_FILE", "VIGIL_SLURM_TOKEN_COMMAND")
# Reverse order of starting; together under the five seconds that a person waits for Ctrl-C.
STOP_ORDER = (
    (("beat", "agent", "demo", "work", "diagnose", "tail", "pull", "follow"), 2.4),
    (("web",), 1.4),
    (("redis",), 0.8),
)


def say(text: str) -> None:
    print(text, flush=True)


# -- the supervisor --------------------------------------------------------------------------------------------------


@dataclass
class Up:
    """One running portal: its children, and what to do about their deaths."""

    settings: ModuleType
    listener: socket.socket
    demo: bool = False
    children: dict[str, Child] = field(default_factory=dict)
    asked_to_stop: int = 0
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
            "PYDANTIC_DISABLE_PLUGINS": "__all__",  # looking for some reads the metadata of every package installed
        }
        if self.demo and not self.settings.VIGIL_LOCAL_CPUS:
            slots = max(2, len(os.sched_getaffinity(0))) + DEMO_SLOTS
            self.environment["VIGIL_LOCAL_CPUS"] = str(slots)

    # starting

    def start(self) -> None:
        """Bring everything up, in parallel where the order allows it. Raises Refused when it cannot be."""
        began = time.monotonic()
        mark = fingerprint(self.settings)
        prepared = is_prepared(self.settings, mark)
        if not prepared:
            say("Preparing the database and static files …")
        self._start_redis()
        with self._start_web(mark) as preparing:
            # Importing Django takes most of a start: the worker does it meanwhile, if nothing should be left to do.
            if prepared:
                self._start_worker("follow")
            said = self._hear(preparing)
        if not prepared:
            self._start_worker("follow")
        self._wait_until_ready()
        self._start_background()
        if self.demo:
            self._make_demo()
        self.has_been_ready = True
        url = self.settings.VIGIL_PUBLIC_URL
        say(f"Vigil is ready at {url} ({time.monotonic() - began:.1f} s). Data in {self.home}; Ctrl-C stops it.")
        for line in said:
            say(line)

    def _start_redis(self) -> None:
        if os.environ.get("REDIS_URL") or os.environ.get("REDIS_URL_FILE"):
            if problem := redis_server.url_answers(self.settings.REDIS_URL):
                raise Refused(
                    f"the Redis that REDIS_URL names does not answer ({problem}): start it, or unset REDIS_URL."
                )
            return
        directory = self.home / "redis"
        try:
            command = redis_server.command(redis_server.find_server(), directory)
        except redis_server.NoRedis as error:
            raise Refused(str(error)) from None
        watch = Watch(
            self.settings.VIGIL_UNRESPONSIVE_SECONDS,
            answers=lambda: redis_server.is_alive(redis_server.socket_path(directory)),
            every_s=REDIS_PING_S,
        )
        redis = self._add("redis", command, important=None, watch=watch, longest_wait_s=REDIS_BACK_OFF_S)
        deadline = time.monotonic() + START_PATIENCE_S
        while not redis_server.answers(redis_server.socket_path(directory)):
            if time.monotonic() > deadline:
                raise Refused(f"Redis does not answer; its log {redis.log} ends with\n{redis.log_tail()}")
            self.turn(0.01)

    def _start_web(self, mark: str) -> socket.socket:
        """Start web, which prepares the site first; the socket hears what came of that."""
        here, there = socket.socketpair()
        web = [sys.executable, "-m", "console.web", "--fd", str(self.listener.fileno())]
        with there:
            child = self._add(
                "web",
                [*web, "--prepare", mark, "--answer", str(there.fileno())],
                pass_fds=[self.listener.fileno(), there.fileno()],
                watch=self._watch("web"),
            )
        # A web process that is started anew finds the site prepared, and nobody who listens.
        child.command, child.pass_fds = web, [self.listener.fileno()]
        return here

    def _hear(self, preparing: socket.socket) -> list[str]:
        """What web has to say once the site is prepared. Raises Refused if it cannot be."""
        preparing.setblocking(False)
        heard = b""
        while not heard.endswith(b"\n"):
            try:
                more = preparing.recv(65_536)
            except BlockingIOError:
                self.turn(0.02)
                continue
            if not more:
                web = self.children["web"]
                raise Refused(f"web died while it prepared the site; its log {web.log} ends with\n{web.log_tail()}")
            heard += more
        told = json.loads(heard)
        if "refused" in told:
            raise Refused(told["refused"])
        return [str(line) for line in told["said"]]

    def _start_background(self) -> None:
        """What nobody waits for: what it does is there to be done whenever it comes."""
        self._start_worker("work", niceness=10)  # merging and verifying must not slow what people wait for
        self._start_worker("diagnose", niceness=5)  # reads logs, gigabytes of them where there are so many
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
        """This machine's own, so that whoever starts Vigil sees what a machine does. It posts as others do."""
        home = self.settings.VIGIL_AGENT_HOME
        told = {"URL": f"http://{address_of(self.listener)}", "TOKEN_FILE": str(home / "token"), "STATE": str(home)}
        environment = {f"VIGIL_AGENT_{name}": value for name, value in told.items()}
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
        say("Making the demonstration lab …")
        command = installation.manage("demo")
        demo = Child("demo", command, self.logs / "demo.log", installation.ROOT, self.environment)
        demo.start()
        try:
            while demo.is_running:
                self.turn(0.05)
        finally:
            demo.kill()
        if demo.process and demo.process.returncode:
            raise Refused(f"the demonstration lab cannot be made; its log {demo.log} ends with\n{demo.log_tail()}")
        self._add("demo", [*command, "--live"], niceness=10)  # its machines go on

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_PATIENCE_S
        with Probe(self.listener) as probe:
            while not (probe.answered and all(child.is_ready for child in self.children.values())):
                if time.monotonic() > deadline:
                    late = [name for name, child in self.children.items() if not child.is_ready] or ["web"]
                    raise Refused(f"{late[0]} is not ready after {START_PATIENCE_S:.0f} s: see {self.logs}.")
                self.turn(0.02)
                probe.look()

    # running

    def run(self) -> None:
        """Keep everything alive until asked to stop."""
        while not self.asked_to_stop:
            now = time.monotonic()
            waits = [child.start_again_at - now for child in self.children.values() if child.process is None]
            self.turn(max(0.0, min([LOOK_S, *waits])))

    def turn(self, wait_s: float) -> None:
        """One look at everything: signals, logs, deaths."""
        _sleep(wait_s)
        if self.asked_to_stop and not self.has_been_ready:
            raise Interrupted
        for child in self.children.values():
            for line in child.read_log():
                self._echo(child, line)
            if child.process is not None and not child.is_running:
                self._bury(child)
            elif self.has_been_ready and child.end_if_hung():  # before that, a start has a patience of its own
                limit = self.settings.VIGIL_UNRESPONSIVE_SECONDS
                say(f"{child.name} has shown no sign of life for {limit:g} s and is killed (log: {child.log})")
            elif child.process is None and time.monotonic() >= child.start_again_at and not self.asked_to_stop:
                self._start_again(child)
            child.shorten_log()

    def _start_again(self, child: Child) -> None:
        try:
            child.start()
        except OSError as error:  # no memory or no process to be had just now
            say(f"{child.name} cannot be started ({error}); trying again in {child.note_death():g} s")

    def _bury(self, child: Child) -> None:
        how = child.how_it_ended()
        child.process = None
        if self.asked_to_stop:
            return
        wait = child.note_death()
        if not self.has_been_ready and child.deaths >= HOPELESS_AFTER:
            raise Refused(f"{child.name} does not come up ({how}); its log {child.log} ends with\n{child.log_tail()}")
        say(f"{child.name} {how}; starting it again in {wait:g} s (log: {child.log})")
        if child.name == "redis":
            redis_server.socket_path(self.home / "redis").unlink(missing_ok=True)

    def _echo(self, child: Child, line: str) -> None:
        """Show an important line; from a child that has much to say, only that it has."""
        now = time.monotonic()
        recent = [at for at in self._echoed.get(child.name, []) if now - at < 60]
        self._echoed[child.name] = [*recent, now][-20:]
        if len(recent) < 5:
            say(f"{child.name}: {line[:300]}")
        elif len(recent) == 5:
            say(f"{child.name}: … more in {child.log}")

    # stopping

    def stop(self) -> None:
        """End everything in reverse order, within five seconds whatever hangs."""
        self.asked_to_stop = max(1, self.asked_to_stop)
        for names, patience_s in STOP_ORDER:
            children = [self.children[name] for name in names if name in self.children]
            killed = supervise.stop(children, 0.0 if self.asked_to_stop > 1 else patience_s)
            if killed and self.asked_to_stop == 1:
                say(f"{' and '.join(killed)} did not stop in {patience_s:g} s and had to be killed.")


class Interrupted(Exception):
    """Asked to stop before everything was up."""


# -- signals ---------------------------------------------------------------------------------------------------------

_wakeup: socket.socket | None = None


def _sleep(seconds: float) -> None:
    """Sleep, but wake up for any signal: a death is noticed at once."""
    if _wakeup is None:
        time.sleep(seconds)
    elif select.select([_wakeup], [], [], seconds)[0]:
        _wakeup.recv(4096)


def handle_signals(up: Up) -> None:
    """Ctrl-C and TERM ask to stop, a second one to stop at once."""
    global _wakeup
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    _wakeup = reader
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)

    def ask(number: int, frame: object) -> None:
        up.asked_to_stop += 1

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGTERM:
            signal.signal(number, ask)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)


# -- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("vigil up", description="Run the portal on this machine until Ctrl-C.")
    parser.add_argument("--demo", action="store_true", help="add a made-up lab to look around in")
    parser.add_argument("--host", default=os.environ.get("VIGIL_HOST", "127.0.0.1"), help="address to listen on")
    parser.add_argument("--port", default=os.environ.get("VIGIL_PORT") or "8000", help="0 takes any free port")
    parser.add_argument("--with-parent", action="store_true", help="stop when the process that started this one ends")
    options = parser.parse_args(arguments)
    if options.with_parent:
        supervise.die_with(os.getppid(), signal.SIGTERM)
    os.umask(0o027)  # database, logs and uploads are nobody else's to read
    try:
        return _run(options)
    except Refused as error:
        print(f"vigil up: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    if not options.port.isdecimal() or int(options.port) > 65535:
        raise Refused(f"{options.port!r} is no port: VIGIL_PORT is a number from 1024 to 65535.")
    if options.port == "0":  # taken before the settings are read, which tell the port to everybody
        listener = listen(options.host, 0)
        settings = load_settings(listener.getsockname()[1])
        with one_a_home(settings.VIGIL_HOME):
            return _supervise(Up(settings, listener, demo=options.demo))
    settings = load_settings(int(options.port))
    with one_a_home(settings.VIGIL_HOME):
        return _supervise(Up(settings, listen(options.host, int(options.port)), demo=options.demo))


def _supervise(up: Up) -> int:
    handle_signals(up)
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
    say(f"Vigil has stopped ({time.monotonic() - began:.1f} s). Jobs that were running go on.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
