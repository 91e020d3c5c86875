"""Gives somebody's command in a Slurm job (`vigil attach -- COMMAND`) a folder for its reports, and who posts them.

The command comes first. It runs as it would without us: same folder, same streams, same signals, its exit code is ours.
What fails here is one line on stderr. The portal is asked from a thread, again and again while the command runs, and
gets all that was reported meanwhile; at the end it has some seconds. No Django here, nor the trainer: who posts is
`training.shipper`, a process of its own, for all nodes, as they share the folder.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from vigil_cli.portal import CHECKOUT, Portal, Trouble, find_portal
from vigil_cli.terminal import plain

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOPPING = {signal.SIGTERM: "signal", signal.SIGUSR1: "time_limit"}  # what vigil_report.stopping() tells of
WAITS_S = (2.0, 30.0)  # before the portal is asked again: first and longest
LAST_ASK_S = 6.0  # at the end: for an answer that is on its way …
DRAIN_S = 10.0  # … and for what is still to be posted
PASSING = frozenset({0, 404, 409, 429})  # no answer; an older portal, or its proxy; not yet; too many; and all of 5xx
NO_SUCH, NOT_RUN = 127, 126  # as shells say it


def run(command: list[str], wanted: Mapping[str, Any], directory: Path | None) -> int:
    """Run the command to its end, attached where that can be; its exit code."""
    slurm = Slurm.of(os.environ)
    place = None
    if slurm is None:
        say("this is no job of Slurm's, so nothing is attached; the command runs all the same")
    elif not slurm.is_followed(os.environ):  # else by who is around us
        try:
            place = Place.make(directory or Path.cwd() / ".vigil", slurm)
        except OSError as error:
            say(f"no reports: {error}; the command runs all the same")
    if slurm is None or place is None:
        return WrappedCommand(command).run()
    told = {"directory": _line(str(Path.cwd())), "command": _line(shlex.join(command)), **wanted}
    body = {"scheduler_id": slurm.number, "restart_count": slurm.restart_count, "reports": True, **told}
    posting = Posting(place, body)
    posting.start()
    return WrappedCommand(command, place.environment(os.environ), place.attempt).run(posting.end)


@dataclass(frozen=True)
class Slurm:
    """The job that we run in. `number`: as Slurm writes it, of a task in an array "17_3"."""

    number: str
    restart_count: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Slurm | None:
        array, task = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
        number = f"{array}_{task}" if array.isdecimal() and task.isdecimal() else environment.get("SLURM_JOB_ID", "")
        if not number.replace("_", "", 1).isdecimal():
            return None
        count = environment.get("SLURM_RESTART_COUNT", "")
        return cls(number, int(count) if count.isdecimal() else 0)

    def is_followed(self, environment: Mapping[str, str]) -> bool:
        """Whether this very run reports already: it is Vigil's own, or another `vigil attach` is around us.

        Its variables alone prove nothing: a job that is submitted from within another one inherits them.
        """
        with suppress(KeyError, OSError, ValueError):
            owner = json.loads((Path(environment["VIGIL_ATTEMPT_DIR"]) / "owner.json").read_text())
            return bool(owner == self.owner)
        return False

    @property
    def owner(self) -> dict[str, object]:
        return {"scheduler_id": self.number, "restart_count": self.restart_count}


@dataclass(frozen=True)
class Place:
    """The folders of this start, as a run directory of Vigil's has them. All nodes see them."""

    root: Path
    attempt: Path
    incarnation: int  # starts of this run before this one
    generation: int  # starts of this job with this one

    @classmethod
    def make(cls, folder: Path, slurm: Slurm) -> Place:
        root = folder.absolute() / slurm.number
        attempt = root / "job" / f"attempt-{slurm.restart_count + 1}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ignored = folder / ".gitignore"
        if not ignored.exists():
            ignored.write_text("*\n")
        (root / "portal").mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("spool", "stacks", "lib"):
            (attempt / name).mkdir(parents=True, exist_ok=True)
        (attempt / "stop-requested").unlink(missing_ok=True)
        _write(attempt / "owner.json", json.dumps(slurm.owner))
        _copy_reporting(attempt / "lib")
        place = cls(root, attempt, _count(attempt / "starts") - 1, _count(root / "job" / "starts"))
        _write(root / "job" / "GENERATION", str(place.generation))
        return place

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """What vigil_report.py reads on every node, which srun hands on."""
        path = [str(self.attempt / "lib"), *filter(None, [before.get("PYTHONPATH", "")])]
        return {
            **before,
            "PYTHONPATH": ":".join(path),
            "VIGIL_RUN_DIR": str(self.root),
            "VIGIL_ATTEMPT_DIR": str(self.attempt),
            "VIGIL_INCARNATION": str(self.incarnation),
            "VIGIL_GENERATION": str(self.generation),
            "VIGIL_RESUME": self.newest_checkpoint(),
        }

    def newest_checkpoint(self) -> str:
        """The newest checkpoint of this Slurm job, by an earlier start; "" where there is none.

        Each start goes on from the newest, so the last start's last is it.
        """
        found = []
        for committed in (self.root / "job" / "checkpoints").glob("step-*/COMMITTED"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                told = json.loads(committed.read_text())
                found.append((int(told["generation"]), int(told["step"]), committed.parent.name))
        return max(found)[2] if found else ""


class WrappedCommand:
    """Somebody's command; what reaches us as a signal reaches it."""

    def __init__(
        self, words: list[str], environment: Mapping[str, str] | None = None, attempt: Path | None = None
    ) -> None:
        self.words, self.environment, self.attempt = words, environment, attempt
        self.process: subprocess.Popen[bytes] | None = None
        self.early: list[int] = []  # that came before it was there

    def run(self, after: Callable[[], None] = lambda: None) -> int:
        """Its exit code; 128 + n where it died of signal n. `after` is called once it has ended."""
        before = {n: signal.signal(n, self._pass_on) for n in PASSED_ON if signal.getsignal(n) != signal.SIG_IGN}
        try:
            return self._run()
        finally:
            after()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        try:
            self.process = subprocess.Popen(self.words, env=self.environment)
        except FileNotFoundError:
            say(f"{self.words[0]}: there is no such command")
            return NO_SUCH
        except OSError as error:
            say(f"{self.words[0]}: {error.strerror}")
            return NOT_RUN
        for number in self.early:
            self.process.send_signal(number)
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.attempt is not None and number in STOPPING:
            with suppress(OSError):
                _write(self.attempt / "stop-requested", json.dumps({"reason": STOPPING[signal.Signals(number)]}))
        if number in {signal.SIGINT, signal.SIGQUIT} and _from_keyboard():
            return  # the terminal has told it already
        if self.process is None:
            self.early.append(number)
        else:
            self.process.send_signal(number)


class Posting:
    """Attaches from a thread, then keeps a shipper running; `end` gives both a last moment."""

    def __init__(self, place: Place, body: dict[str, Any]) -> None:
        self.place, self.body = place, body
        self.over = threading.Event()
        self.shipper: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._work, name="vigil-attach", daemon=True)
        self.said = ""

    def start(self) -> None:
        self.thread.start()

    def end(self) -> None:
        self.over.set()
        self.thread.join(LAST_ASK_S)
        if self.shipper is None or self.shipper.stdin is None:
            return
        with suppress(OSError):
            self.shipper.stdin.close()
        try:
            self.shipper.wait(DRAIN_S + 2)
        except subprocess.TimeoutExpired:
            self.shipper.kill()
            self.shipper.wait()

    def _work(self) -> None:
        try:
            if self._attach():
                self._ship()
        except Exception as error:  # whatever it is, it must not reach the command
            self._say(f"the run goes on without Vigil: {error!r}")

    def _attach(self) -> bool:
        """Ask until the portal answers; a last time when the command has ended."""
        try:
            portal = find_portal()
        except Trouble as trouble:
            self._say(f"the run goes on without Vigil. {trouble}")
            return False
        wait, longest = WAITS_S
        while True:
            is_last = self.over.is_set()
            try:
                self._take(portal, portal.post("jobs/attach", json=self.body))
                return True
            except Trouble as trouble:
                if trouble.status not in PASSING and trouble.status < 500:
                    self._say(f"the run goes on without Vigil. {_words(trouble)}")
                    return False
                if trouble.status != 409:
                    self._say(f"the run goes on, and is attached once the portal answers. {trouble}")
                else:
                    wait = WAITS_S[0]
            if is_last:
                return False
            self.over.wait(wait)
            wait = min(wait * 1.5, longest)

    def _take(self, portal: Portal, answer: dict[str, Any]) -> None:
        told = {**answer["reports"], "url": portal.url, "reports": "post"}
        _write(self.place.root / "portal" / "token", json.dumps(told), mode=0o600)
        say(f"this run is #{answer['job']['id']}: {answer['job']['url']}")

    def _ship(self) -> None:
        """Keep one running until the command has ended; at least one, which `end` gives its moment."""
        wait = 1.0
        while True:
            self.shipper = shipper = self._start_shipper()
            while shipper.poll() is None:
                if self.over.wait(1.0):
                    return
            if self.over.wait(wait):
                return
            wait = min(wait * 2, WAITS_S[1])

    def _start_shipper(self) -> subprocess.Popen[bytes]:
        home = str(CHECKOUT)
        arguments = [str(self.place.root), str(self.place.attempt), "--every-node", "--drain", str(DRAIN_S)]
        with open(self.place.attempt / "shipper.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "training.shipper", *arguments],
                env={**os.environ, "PYTHONPATH": home}, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0,
            )  # fmt: skip

    def _say(self, line: str) -> None:
        if line != self.said:
            self.said = line
            say(line)


def say(line: str) -> None:
    with suppress(OSError, ValueError):  # stderr may be closed: that is the command's affair
        print(f"vigil: {plain(' '.join(line.split()))}", file=sys.stderr, flush=True)


def _words(trouble: Trouble) -> str:
    """What the portal does not take, field by field where it says so."""
    errors = trouble.problem.get("errors") or []
    return " ".join(f"{error['field']}: {error['message']}" for error in errors) or str(trouble)


def _from_keyboard() -> bool:
    """Whether we are in a terminal's foreground: it tells everybody there by itself."""
    for stream in (0, 2):
        with suppress(OSError):
            return os.tcgetpgrp(stream) == os.getpgrp()
    return False


def _count(folder: Path) -> int:
    """How many have come here, with us: each makes a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.iterdir())) + 1
    while True:
        try:
            (folder / str(number)).mkdir()
        except FileExistsError:
            number += 1
        else:
            return number


def _copy_reporting(folder: Path) -> None:
    """vigil_report.py and nothing else, so that nothing else of ours gets onto the command's path."""
    import vigil_report

    temporary = folder / f".{os.getpid()}"
    shutil.copyfile(vigil_report.__file__, temporary)
    os.replace(temporary, folder / "vigil_report.py")


def _write(path: Path, text: str, mode: int = 0o640) -> None:
    """Replace a small file whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    os.replace(temporary, path)


def _line(text: str) -> str:
    """The text as one printable line that the portal takes."""
    return "".join(c if c.isprintable() else " " for c in text)[:4096]
