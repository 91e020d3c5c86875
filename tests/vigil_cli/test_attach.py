"""Test `vigil attach` as people run it: next to their command, in a Slurm job simulated by its variables."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.stack import REPOSITORY
from tests.training.intake import TOKEN, Intake
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow
JOB = {"id": 7, "name": "big", "url": "http://portal/jobs/7"}
TRAIN = """
import os, sys, time, vigil_report
vigil_report.progress(0, 3)
for step in (1, 2, 3):
    vigil_report.log(step, loss=1 / step)
print(os.environ.get("SLURM_PROCID"), vigil_report.resume_path())
"""


@dataclass
class Portal:
    """Takes attachments and reports. `refuses`: statuses answered instead, one a request."""

    intake: Intake = field(default_factory=Intake)
    attached: list[dict[str, Any]] = field(default_factory=list)
    refuses: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        portal = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                sent = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = portal.answer(self.path, self.headers, sent)
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *about: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        if path == "/api/v1/jobs/attach":
            assert headers["Authorization"] == "Bearer mine"
            self.attached.append(json.loads(body))
            if self.refuses:
                status, detail = self.refuses.pop(0)
                return status, {"detail": detail, "status": status}
            owner = {name: self.attached[-1][name] for name in ("scheduler_id", "restart_count")}
            return 201, {"job": JOB, "reports": {"attempt": 3, "number": 1, "token": TOKEN, **owner}}
        assert (path, headers["Authorization"]) == ("/api/v1/attempts/3/reports", f"Bearer {TOKEN}")
        with self.intake.lock:
            return 200, {"streams": self.intake.take(json.loads(gzip.decompress(body))), "version": 1}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def portal() -> Iterator[Portal]:
    created = Portal()
    yield created
    created.close()


class Runs:
    """Starts `vigil attach` in a folder of its own; none outlives the test."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "VIGIL_"))}
        settings = {"VIGIL_HOME": str(folder / "home"), "XDG_CONFIG_HOME": str(folder), "PYTHONPATH": str(REPOSITORY)}
        self.environment = {**inherited, **settings, "VIGIL_URL": url, "VIGIL_TOKEN": "mine", "SLURM_JOB_ID": "12345"}

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        self.started.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "vigil_cli.main", "attach", *words],
                cwd=self.folder,
                env={**self.environment, **environment},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        )
        return self.started[-1]

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    @property
    def place(self) -> Path:
        return self.folder / ".vigil" / "12345"


@pytest.fixture
def runs(tmp_path: Path, portal: Portal) -> Iterator[Runs]:
    created = Runs(tmp_path, portal.url)
    (tmp_path / "train.py").write_text(TRAIN)
    yield created
    for process in created.started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what it started, which else keeps its pipes open
        process.communicate()


def losses(portal: Portal) -> list[tuple[int, int, int, float]]:
    points = portal.intake.points
    return sorted((incarnation, rank, step, value) for (_, incarnation, rank, _, step), value in points)


def test_what_all_ranks_report_arrives_and_nothing_else_changes(portal: Portal, runs: Runs) -> None:
    ranks = 'for rank in 0 1; do SLURM_PROCID=$rank SLURMD_NODENAME=node$rank "$0" train.py; done; exit 5'
    done = runs.run("--name", "big", "--tag", "a", "--", "sh", "-c", ranks, sys.executable)
    assert done.returncode == 5
    assert done.stdout == "0 None\n1 None\n"
    assert done.stderr == "vigil: this run is #7: http://portal/jobs/7\n"
    expected = [(0, rank, step, 1 / step) for rank in (0, 1) for step in (1, 2, 3)]
    assert losses(portal) == expected
    assert len(portal.intake.ended) == 2
    (run,) = portal.attached
    assert (run["scheduler_id"], run["restart_count"], run["name"], run["tags"]) == ("12345", 0, "big", ["a"])
    assert (run["directory"], run["reports"]) == (str(runs.folder), True)
    assert (runs.place / "portal" / "token").stat().st_mode & 0o777 == 0o600


def test_a_portal_that_is_away_stops_nothing_and_hears_all_of_it_later(portal: Portal, runs: Runs) -> None:
    portal.refuses = [(503, "Busy.")]
    waits = f"{sys.executable} train.py; touch reported; while [ ! -e go ]; do sleep 0.05; done"
    process = runs.start("--", "sh", "-c", waits)
    until(lambda: (runs.folder / "reported").exists(), "the command to report")
    until(lambda: len(portal.attached) > 1, "the portal to be asked again")
    until(lambda: len(losses(portal)) == 3, "its reports")
    (runs.folder / "go").touch()
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err.count("\n")) == (0, 2)
    assert err.startswith("vigil: the run continues, and is attached once the portal answers.")


def test_without_a_portal_the_command_runs_and_prints_a_line(runs: Runs) -> None:
    began = time.monotonic()
    done = runs.run("--", sys.executable, "train.py", VIGIL_URL="http://127.0.0.1:9")
    assert time.monotonic() - began < 20
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "None None\n", 1)
    assert list((runs.place / "job" / "attempt-1" / "spool").iterdir()), "kept for later"


def test_a_refusal_is_printed_once(portal: Portal, runs: Runs) -> None:
    portal.refuses = [(403, "Slurm has no job 12345 of yours.")]
    done = runs.run("--", "true")
    assert (done.returncode, len(portal.attached)) == (0, 1)
    assert done.stderr == "vigil: the run continues without Vigil. Slurm has no job 12345 of yours.\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_are_passed_on(runs: Runs, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    handles = f"trap 'exit 42' {name}; echo ready; while :; do sleep 0.05; done"
    process = runs.start("--", "bash", "-c", handles)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 42
    path = runs.place / "job" / "attempt-1" / "stop-requested"
    assert path.exists() is (number != signal.SIGINT)


def test_death_by_a_signal_is_reported_as_a_shell_does(runs: Runs) -> None:
    assert runs.run("--", "sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL
    assert runs.run("--", "no-such-command").returncode == 127
    assert runs.run("--", "/etc/passwd").returncode == 126


def test_the_next_start_is_an_incarnation_and_finds_the_checkpoint(portal: Portal, runs: Runs) -> None:
    saves = "import vigil_report as v; open('model.pt', 'w').close(); v.log(4, loss=9.0); v.checkpoint('model.pt', 4)"
    assert runs.run("--", sys.executable, "-c", saves).returncode == 0
    saved = runs.place / "job" / "checkpoints" / "step-4" / "model.pt"
    assert runs.run("--", sys.executable, "train.py").stdout == f"None {saved}\n"
    assert {point[0] for point in losses(portal)} == {0, 1}
    requeued = runs.run("--", sys.executable, "train.py", SLURM_RESTART_COUNT="1")
    assert requeued.stdout == f"None {saved}\n"
    assert (portal.attached[-1]["restart_count"], (runs.place / "job" / "attempt-2" / "spool").is_dir()) == (1, True)


def test_in_a_run_that_is_followed_it_only_runs_the_command(portal: Portal, runs: Runs) -> None:
    """A job of Vigil's own, or one attached further out; but not a job submitted from within such a one."""
    inner = [sys.executable, "-P", "-m", "vigil_cli.main", "attach", "--", "true"]
    assert runs.run("--", *inner).returncode == 0
    assert len(portal.attached) == 1
    assert runs.run("--", "env", "SLURM_JOB_ID=12346", *inner).returncode == 0
    assert [request["scheduler_id"] for request in portal.attached] == ["12345", "12345", "12346"]


def test_a_task_of_an_array_goes_by_its_place_in_it(portal: Portal, runs: Runs) -> None:
    assert runs.run("--", "true", SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="3").returncode == 0
    assert portal.attached[0]["scheduler_id"] == "17_3"


def test_where_no_folder_can_be_made_the_command_runs(portal: Portal, runs: Runs) -> None:
    (runs.folder / "file").write_text("")
    done = runs.run("--directory", "file/below", "--", "echo", "here")
    assert (done.returncode, done.stdout) == (0, "here\n")
    assert "no reports" in done.stderr


@pytest.mark.parametrize("words", [(), ("--",), ("train.py",), ("12", "--", "true")])
def test_wrong_usage_is_explained(runs: Runs, words: tuple[str, ...]) -> None:
    done = runs.run(*words)
    assert done.returncode == 2
    assert "vigil attach" in done.stderr
