"""A child's results are read whatever its libraries do: they print, and they may take minutes to import."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from training.burnin import child

ROOT = Path(__file__).parents[3]
TORCH = """\
import os
from types import SimpleNamespace
{first}
__version__, version = "2.13", SimpleNamespace(cuda=None)
cuda = SimpleNamespace(is_available=lambda: False)
"""


def facts(folder: Path, first: str) -> list[dict[str, Any]]:
    """Run the test of facts with a torch that does something first; return the results."""
    (folder / "torch.py").write_text(TORCH.format(first=first))
    found: list[dict[str, Any]] = []
    test = child.TestProcess(["facts", "{}"], {"PYTHONPATH": f"{folder}:{ROOT}"}, "this node")
    child.run_children([test], found.append, limit_s=60)
    return found


def test_a_line_that_a_library_begins_loses_no_result(tmp_path: Path) -> None:
    (line,) = facts(tmp_path, 'os.write(1, b"dgx-01:7:7 [0] NCCL INFO ")')
    assert (line["test"], line["outcome"], line["torch"]) == ("facts", "passed", "2.13")


def test_a_python_without_numpy_fails_before_any_test_begins(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")")
    (line,) = facts(tmp_path, "")
    assert (line["test"], line["outcome"]) == ("start", "failed")
    assert line["detail"] == "ended with code 1: ModuleNotFoundError: No module named 'numpy'"


def test_a_slow_import_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "SILENT_S", 0.8)
    (line,) = facts(tmp_path, "import time; time.sleep(1.5)")
    assert (line["test"], line["outcome"]) == ("facts", "passed")


@pytest.fixture
def locked_memory() -> Iterator[int]:
    """Lower what this process and its children may lock, as `ulimit -S -l` does."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4_096, before[1]))
    yield 4_096
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_the_soft_limit_of_locked_memory_counts(tmp_path: Path, locked_memory: int) -> None:
    (line,) = facts(tmp_path, "")
    assert line["memlock_bytes"] == locked_memory
