"""Test removal from disk: spools some days after their attempt has closed, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from jobs.disk import retention, rundir, trash
from jobs.models import Attempt
from tests.jobs.reporting import attempt_of
from tests.lab import on_disk

pytestmark = pytest.mark.django_db


@pytest.fixture
def root(settings: Any, tmp_path: Path) -> Path:
    settings.VIGIL_RUNS = tmp_path / "runs"
    settings.VIGIL_SPOOL_DAYS = 14
    return tmp_path


def closed(days_ago: float | None) -> tuple[Attempt, Path]:
    """Return an attempt with a spool, a log and a checkpoint, and its folder."""
    attempt = attempt_of(directory="attempt-1")
    if days_ago is not None:
        Attempt.objects.filter(pk=attempt.pk).update(closed_at=timezone.now() - timedelta(days=days_ago))
    job = attempt.job
    on_disk(job)
    folder = rundir.path_of(job.directory) / "job" / "attempt-1"
    for name in ("spool/0.0.ab.jsonl", "logs/0.0.log", "result.json"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return attempt, folder


def test_spools_go_some_days_after_the_attempt_has_closed(root: Path) -> None:
    (_, running), (_, fresh), (old, gone) = closed(None), closed(13.9), closed(14.1)
    assert retention.remove_spools() == 1
    assert (running / "spool").is_dir()
    assert (fresh / "spool").is_dir()
    assert sorted(path.name for path in gone.iterdir()) == ["logs", "result.json"]
    old.refresh_from_db()
    assert old.spools_removed_at
    assert retention.remove_spools() == 0


def test_the_longest_retention_keeps_spools_for_ever(root: Path, settings: Any) -> None:
    environment = {**os.environ, "VIGIL_SPOOL_DAYS": "100000", "VIGIL_HOME": str(root)}
    days = "from portal import settings; print(settings.VIGIL_SPOOL_DAYS)"
    found = subprocess.run([sys.executable, "-c", days], env=environment, capture_output=True, text=True, check=True)
    _, folder = closed(1000)
    settings.VIGIL_SPOOL_DAYS = int(found.stdout)
    assert retention.remove_spools() == 0
    assert (folder / "spool").is_dir()


def test_a_link_in_a_run_directory_leads_nowhere(root: Path) -> None:
    treasure = root / "treasure"
    treasure.mkdir()
    (treasure / "kept").write_text("x")
    (_, spool), (_, inside), (_, whole) = closed(20), closed(20), closed(20)
    (spool / "spool" / "0.0.ab.jsonl").unlink()
    (spool / "spool").rmdir()
    (spool / "spool").symlink_to(treasure)
    (inside / "spool" / "out").symlink_to(treasure)
    os.rename(whole, whole.parent / "elsewhere")
    whole.symlink_to(root)
    (root / "spool").mkdir()
    retention.remove_spools()
    assert (treasure / "kept").exists()
    assert (root / "spool").exists()
    assert not (inside / "spool").exists()


def test_what_has_gone_already_is_no_error(root: Path) -> None:
    (attempt, folder) = closed(20)
    with trash.moved_to_trash(attempt.job.directory):
        pass
    assert retention.remove_spools() == 1
    assert not folder.exists()


def test_where_the_file_system_is_away_nothing_has_gone(root: Path) -> None:
    """The folder that it is mounted on is there, and empty."""
    attempt, folder = closed(20)
    runs = rundir.runs_root()
    os.rename(runs, root / "away")
    runs.mkdir()
    assert retention.remove_spools() == 0
    runs.rmdir()
    os.rename(root / "away", runs)
    assert retention.remove_spools() == 1
    assert not (folder / "spool").exists()


def test_what_cannot_be_removed_does_not_keep_the_rest_waiting(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_PER_RUN", 1)
    (_, odd), (_, plain) = closed(20), closed(20)
    os.rename(odd / "spool", odd / "elsewhere")
    (odd / "spool").symlink_to(odd / "elsewhere")
    for _ in range(100):  # rounds; each reads one attempt
        if retention.remove_spools():
            break
    assert not (plain / "spool").exists()
    assert (odd / "elsewhere").exists()
