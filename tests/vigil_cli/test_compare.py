"""Test that `vigil compare` hands over to the trainer, in a process that may import torch."""

import sys

import pytest
from click.testing import CliRunner

from vigil_cli import main


def test_becomes_the_trainers_command(monkeypatch: pytest.MonkeyPatch):
    requests = []
    monkeypatch.setattr(main.os, "execv", lambda program, words: requests.append((program, words)))
    CliRunner().invoke(main.main, ["compare", "run.toml", "--with", "a=dtype=bf16", "--help"])
    words = [sys.executable, "-P", "-m", "training", "compare", "run.toml", "--with", "a=dtype=bf16", "--help"]
    assert requests == [(sys.executable, words)]
