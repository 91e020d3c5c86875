"""Test `vigil check slurm`: what it passes on, and whom it turns away."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from vigil_cli import check
from vigil_cli.main import main


def test_options_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VIGIL_HOME", str(tmp_path))
    requests: list[list[str]] = []
    monkeypatch.setattr(check.os, "execv", lambda program, words: requests.append(words))
    words = ["--json", "--no-jobs", "--partition", "a", "--partition", "b", "--user", "--x", "--wait", "9"]
    CliRunner().invoke(main, ["check", "slurm", *words], catch_exceptions=False)
    (command,) = requests
    expected = ["check_slurm", "--json", "--no-jobs", "--partition=a", "--partition=b", "--user=--x", "--wait=9.0"]
    assert command[3:] == expected


def test_another_user_than_the_worker_is_sent_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before any setting is read: that alone makes files in a home, which the worker could not write then."""
    monkeypatch.setenv("VIGIL_HOME", str(tmp_path))
    monkeypatch.setattr(check, "os", SimpleNamespace(environ=os.environ, geteuid=lambda: os.geteuid() + 1))
    done = CliRunner().invoke(main, ["check", "slurm"])
    assert done.exit_code == 1
    assert "Run this as that user: sudo -u" in done.output
