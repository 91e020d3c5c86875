"""Run a user's command in a Slurm job (`vigil attach -- COMMAND`) and forward its reports to the portal.

The command comes first. It runs as it would without us: same folder, same streams, same signals, and its exit code is
passed through. A failure here is one line on stderr. A thread contacts the portal again and again while the command
runs and delivers everything reported meanwhile; at the end it gets a few more seconds. Neither Django nor the trainer
is imported here: reports are posted by `training.shipper`, a separate process for all nodes, as they share the folder.
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

from vigil_cli.portal import CliError, Portal, find_portal
from vigil_cli.terminal import plain
from vigil_core import installation

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOPPING = {signal.SIGTERM: "signal", signal.SIGUSR1: "time_limit"}  # the reasons that vigil_report.stopping() returns
RETRY_DELAYS_S = (2.0, 30.0)  # between requests to the portal: first and longest
LAST_REQUEST_S = 6.0  # at the end: for a response that is under way …
DRAIN_S = 10.0  # … and for what is still to be posted
RETRY_STATUSES = frozenset({0, 404, 409, 429})  # no response; older portal or proxy; not yet; too many
EXIT_NOT_FOUND, EXIT_NOT_EXECUTABLE = 127, 126  # as in shells


def run(command: list[str], wanted: Mapping[str, Any], directory: Path | None) -> int:
    """Run the command to its end, attached where possible, and return its exit code."""
    slurm_job = SlurmJob.from_environment(os.environ)
    folders = None
    if slurm_job is None:
        print_message("not in a Slurm job, so nothing is attached; the command runs anyway")
    elif not slurm_job.is_already_attached(os.environ):  # otherwise the outer wrapper reports
        try:
            folders = AttachFolders.make(directory or Path.cwd() / ".vigil", slurm_job)
        except OSError as error:
            print_message(f"no reports: {error}; the command runs anyway")
    if slurm_job is None or folders is None:
        return WrappedCommand(command).run()
    request = {"directory": _printable_line(str(Path.cwd())), "command": _printable_line(shlex.join(command)), **wanted}
    body = {"scheduler_id": slurm_job.number, "restart_count": slurm_job.restart_count, "reports": True, **request}
    posting = ReportForwarder(folders, body)
    posting.start()
    return WrappedCommand(command, folders.environment(os.environ), folders.attempt).run(posting.end)


@dataclass(frozen=True)
class SlurmJob:
    """Identify the Slurm job that we run in. `number` is Slurm's spelling: "17_3" for an array task."""

    number: str
    restart_count: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SlurmJob | None:
        array, task = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
        number = f"{array}_{task}" if array.isdecimal() and task.isdecimal() else environment.get("SLURM_JOB_ID", "")
        if not number.replace("_", "", 1).isdecimal():
            return None
        count = environment.get("SLURM_RESTART_COUNT", "")
        return cls(number, int(count) if count.isdecimal() else 0)

    def is_already_attached(self, environment: Mapping[str, str]) -> bool:
        """Return whether this run reports already: Vigil submitted it, or an outer `vigil attach` wraps us.

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
class AttachFolders:
    """Hold the folders of this start, laid out like a run directory of Vigil. All nodes see them."""

    root: Path
    attempt: Path
    incarnation: int  # starts of this run before this one
    generation: int  # starts of this job with this one

    @classmethod
    def make(cls, folder: Path, slurm_job: SlurmJob) -> AttachFolders:
        root = folder.absolute() / slurm_job.number
        attempt = root / "job" / f"attempt-{slurm_job.restart_count + 1}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ignored = folder / ".gitignore"
        if not ignored.exists():
            ignored.write_text("*\n")
        (root / "portal").mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("spool", "stacks", "lib"):
            (attempt / name).mkdir(parents=True, exist_ok=True)
        (attempt / "stop-requested").unlink(missing_ok=True)
        _write(attempt / "owner.json", json.dumps(slurm_job.owner))
        _copy_reporting(attempt / "lib")
        folders = cls(
            root, attempt, _next_start_number(attempt / "starts") - 1, _next_start_number(root / "job" / "starts")
        )
        _write(root / "job" / "GENERATION", str(folders.generation))
        return folders

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that vigil_report.py reads on every node; srun passes them on."""
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
        """Return the newest checkpoint that an earlier start of this Slurm job wrote, or "".

        Each start resumes from the newest, so the last start's last checkpoint is the newest.
        """
        found = []
        for committed in (self.root / "job" / "checkpoints").glob("step-*/COMMITTED"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                commit = json.loads(committed.read_text())
                found.append((int(commit["generation"]), int(commit["step"]), committed.parent.name))
        return max(found)[2] if found else ""


class WrappedCommand:
    """Run the user's command and forward signals to it."""

    def __init__(
        self, words: list[str], environment: Mapping[str, str] | None = None, attempt: Path | None = None
    ) -> None:
        self.words, self.environment, self.attempt = words, environment, attempt
        self.process: subprocess.Popen[bytes] | None = None
        self.early: list[int] = []  # signals that arrived before the process was started

    def run(self, after: Callable[[], None] = lambda: None) -> int:
        """Run the command and return its exit code, 128 + n if signal n killed it. Calls `after` at its end."""
        before = {
            n: signal.signal(n, self._forward) for n in FORWARDED_SIGNALS if signal.getsignal(n) != signal.SIG_IGN
        }
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
            print_message(f"{self.words[0]}: command not found")
            return EXIT_NOT_FOUND
        except OSError as error:
            print_message(f"{self.words[0]}: {error.strerror}")
            return EXIT_NOT_EXECUTABLE
        for number in self.early:
            self.process.send_signal(number)
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self.attempt is not None and number in STOPPING:
            with suppress(OSError):
                _write(self.attempt / "stop-requested", json.dumps({"reason": STOPPING[signal.Signals(number)]}))
        if number in {signal.SIGINT, signal.SIGQUIT} and _in_foreground():
            return  # the terminal has signalled the process already
        if self.process is None:
            self.early.append(number)
        else:
            self.process.send_signal(number)


class ReportForwarder:
    """Attach from a thread, then keep a shipper running; `end` gives both a last moment to finish."""

    def __init__(self, place: AttachFolders, body: dict[str, Any]) -> None:
        self.place, self.body = place, body
        self.over = threading.Event()
        self.shipper: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._work, name="vigil-attach", daemon=True)
        self.last_message = ""

    def start(self) -> None:
        self.thread.start()

    def end(self) -> None:
        self.over.set()
        self.thread.join(LAST_REQUEST_S)
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
        except Exception as error:  # no error here may affect the command
            self._print_if_new(f"the run continues without Vigil: {error!r}")

    def _attach(self) -> bool:
        """Retry until the portal answers; try one last time when the command has ended."""
        try:
            portal = find_portal()
        except CliError as error:
            self._print_if_new(f"the run continues without Vigil. {error}")
            return False
        wait, longest = RETRY_DELAYS_S
        while True:
            is_last = self.over.is_set()
            try:
                self._store_token(portal, portal.post("jobs/attach", json=self.body))
                return True
            except CliError as error:
                if error.status not in RETRY_STATUSES and error.status < 500:
                    self._print_if_new(f"the run continues without Vigil. {_problem_text(error)}")
                    return False
                if error.status != 409:
                    self._print_if_new(f"the run continues, and is attached once the portal answers. {error}")
                else:
                    wait = RETRY_DELAYS_S[0]
            if is_last:
                return False
            self.over.wait(wait)
            wait = min(wait * 1.5, longest)

    def _store_token(self, portal: Portal, answer: dict[str, Any]) -> None:
        token_file = {**answer["reports"], "url": portal.url, "reports": "post"}
        _write(self.place.root / "portal" / "token", json.dumps(token_file), mode=0o600)
        print_message(f"this run is #{answer['job']['id']}: {answer['job']['url']}")

    def _ship(self) -> None:
        """Keep a shipper running until the command has ended. Start at least one, for `end` to drain."""
        wait = 1.0
        while True:
            self.shipper = shipper = self._start_shipper()
            while shipper.poll() is None:
                if self.over.wait(1.0):
                    return
            if self.over.wait(wait):
                return
            wait = min(wait * 2, RETRY_DELAYS_S[1])

    def _start_shipper(self) -> subprocess.Popen[bytes]:
        home = str(installation.ROOT)
        arguments = [str(self.place.root), str(self.place.attempt), "--every-node", "--drain", str(DRAIN_S)]
        with open(self.place.attempt / "shipper.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "training.shipper", *arguments],
                env={**os.environ, "PYTHONPATH": home}, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0,
            )  # fmt: skip

    def _print_if_new(self, line: str) -> None:
        if line != self.last_message:
            self.last_message = line
            print_message(line)


def print_message(line: str) -> None:
    with suppress(OSError, ValueError):  # the command may have closed stderr
        print(f"vigil: {plain(' '.join(line.split()))}", file=sys.stderr, flush=True)


def _problem_text(problem: CliError) -> str:
    """Return what the portal refused, field by field if it names fields."""
    errors = problem.problem.get("errors") or []
    return " ".join(f"{error['field']}: {error['message']}" for error in errors) or str(problem)


def _in_foreground() -> bool:
    """Return whether we are in a terminal's foreground group, all of which the terminal signals itself."""
    for stream in (0, 2):
        with suppress(OSError):
            return os.tcgetpgrp(stream) == os.getpgrp()
    return False


def _next_start_number(folder: Path) -> int:
    """Return the number of starts in this folder including ours; each start creates a subfolder."""
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
    """Copy vigil_report.py alone, so that none of our other modules gets onto the command's path."""
    import vigil_report

    temporary = folder / f".{os.getpid()}"
    shutil.copyfile(vigil_report.__file__, temporary)
    os.replace(temporary, folder / "vigil_report.py")


def _write(path: Path, text: str, mode: int = 0o640) -> None:
    """Write a small file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    os.replace(temporary, path)


def _printable_line(text: str) -> str:
    """Return the text as one printable line that the portal accepts."""
    return "".join(c if c.isprintable() else " " for c in text)[:4096]
