"""Set up benches of reports: an attempt's run directory as the launcher makes it, and its real shipper."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from bench import stage

SECRET = "the attempt's own token"


def run_directory(run_dir: Path, attempt: int, port: int) -> Path:
    """Make a run directory as the portal and the launcher would."""
    attempt_dir = run_dir / "job" / "attempt-1"
    (attempt_dir / "spool").mkdir(parents=True)
    owner = {"scheduler_id": "1", "restart_count": 0}
    (attempt_dir / "owner.json").write_text(json.dumps(owner))
    (run_dir / "portal").mkdir()
    settings = {"attempt": attempt, "number": 1, **owner, "url": f"http://127.0.0.1:{port}", "token": SECRET}
    (run_dir / "portal" / "token").write_text(json.dumps(settings))
    return attempt_dir


def shipper(run_dir: Path, attempt_dir: Path, place: stage.Site) -> AbstractContextManager[subprocess.Popen[bytes]]:
    command = [sys.executable, "-P", "-m", "training.shipper", run_dir, attempt_dir, "--node", "here"]
    # It ends when its stdin does, so it gets one that stays open.
    path = {"PYTHONPATH": str(stage.REPOSITORY)}
    return stage.process(command, place.home / "shipper.log", stdin=True, environment=path)
