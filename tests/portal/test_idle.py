"""Test what an idle portal does, and what its processes load for that; bench/idle.py has the figures."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.stack import REPOSITORY, Stack
from tests.waiting import until

WORKER = (
    "import console.worker, celery.apps.worker, jobs.tasks, portal.tasks; from jobs.following import follow; "
    "from jobs.following.submission import handover"
)
BEAT = "import portal.ticks, celery.apps.beat"


@pytest.mark.parametrize(
    ("code", "without"),
    [
        (WORKER, {"ninja", "uvicorn", "jobs.api", "console.urls", "celery.bin", "prompt_toolkit"}),
        (BEAT, {"django.db", "jobs", "celery.bin", "prompt_toolkit"}),
    ],
    ids=["worker", "beat"],
)
def test_modules_that_are_not_needed_are_not_loaded(tmp_path: Path, code: str, without: set[str]) -> None:
    environment = {**os.environ, "VIGIL_HOME": str(tmp_path), "DJANGO_SETTINGS_MODULE": "portal.settings"}
    command = [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"]
    loaded = subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True, text=True)
    assert not without & set(loaded.stdout.split())


@pytest.mark.slow
def test_a_worker_keeps_its_database_open(portal_up: Stack) -> None:
    follower, database = psutil.Process(portal_up.pid("follow")), str(portal_up.home / "vigil.sqlite3")

    def has_it_open() -> bool:
        return database in {file.path for file in follower.open_files()}

    until(has_it_open, "its first task")
    deadline = time.monotonic() + 4.5  # two ticks
    while time.monotonic() < deadline:
        assert has_it_open()
        time.sleep(0.05)


@pytest.mark.slow
def test_a_waiting_worker_stops_on_request(portal_up: Stack, tmp_path: Path) -> None:
    """Its wait for a task, which nobody sends to that queue, would last twenty seconds more (polling_interval)."""
    path = tmp_path / "log"
    with path.open("w") as log:
        worker = subprocess.Popen(
            portal_up.command("-m", "console.worker", "nothing"), cwd=REPOSITORY, env=portal_up.environment, stderr=log
        )
    until(lambda: " ready." in path.read_text(), "the worker to be there")
    until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_SLEEPING, "it to wait")
    worker.terminate()
    assert worker.wait(10) == 0


@pytest.mark.slow
def test_only_what_pages_need_is_collected(prepared_home: Path) -> None:
    static = prepared_home / "static"
    assert {path.name.partition(".")[0] for path in (static / "ninja").iterdir()} == {
        "favicon",
        "swagger-ui",
        "swagger-ui-bundle",
        "swagger-ui-init",
    }
    hashed = json.loads((static / "staticfiles.json").read_text())["paths"]
    text = "".join((static / hashed[name]).read_text() for name in hashed if name.startswith("js/"))
    imported = {f"js/{module}" for module in re.findall(r'(?:from|import) "\./([^"]+)"', text)}
    assert imported, "our modules import each other"
    assert imported <= set(hashed.values()), "by names that a browser may keep for good"
