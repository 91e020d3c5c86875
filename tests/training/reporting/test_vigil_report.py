"""Test vigil_report in a program: the program's own checkpoints, and no effect outside of a job."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vigil_report
from training import manifest


@pytest.fixture(autouse=True)
def _terminable() -> Iterator[None]:
    """vigil_report takes TERM over from a program that does not handle it; here that is the process of the tests."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def reporting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make this process a rank of a script; return the folder of checkpoints."""
    attempt = tmp_path / "job" / "attempt-1"
    (attempt / "stacks").mkdir(parents=True)
    (tmp_path / "job" / "GENERATION").write_text("3\n")
    payload = {"VIGIL_RUN_DIR": str(tmp_path), "VIGIL_ATTEMPT_DIR": str(attempt), "VIGIL_GENERATION": "3"}
    for name, value in {
        **payload,
        "VIGIL_INCARNATION": "0",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "VIGIL_RESUME": "",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(vigil_report, "_process_stream", None)
    monkeypatch.setattr(vigil_report, "_is_disabled", False)
    monkeypatch.setattr(vigil_report, "_ancestors", [])
    yield tmp_path / "job" / "checkpoints"
    stream = vigil_report._process_stream
    if stream is not None:
        stream.close()


def _file(folder: Path, name: str = "model.pt", data: bytes = b"weights") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_a_file_is_copied_whole_and_found_again(
    reporting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path)
    assert vigil_report.checkpoint(path, 40) == reporting / "step-40"
    path.write_bytes(b"changed afterwards")
    found = manifest.verify(reporting / "step-40")
    assert found.files[0] == manifest.CheckpointFile("model.pt", 7, hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setenv("VIGIL_RESUME", "step-40")
    assert vigil_report.resume_path() == reporting / "step-40" / "model.pt"


@pytest.mark.parametrize("names", [["a.bin", "b.json"], ["a.bin", "deep/er/b.json"], ["a name with spaces.bin"]])
def test_a_folder_comes_back_as_it_was(
    reporting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    for name in names:
        _file(tmp_path / "state", name, name.encode())
    assert vigil_report.checkpoint(tmp_path / "state", 5)
    manifest.verify(reporting / "step-5")
    monkeypatch.setenv("VIGIL_RESUME", "step-5")
    found = vigil_report.resume_path()
    assert found is not None
    assert [(found / name).read_bytes() for name in names] == [name.encode() for name in names]


def test_what_cannot_be_saved_is_reported_and_does_no_harm(
    reporting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing.pt", tmp_path / "empty", _file(tmp_path, "COMMITTED")):
        assert vigil_report.checkpoint(path, 5) is None
    path = _file(tmp_path)
    assert vigil_report.checkpoint(path, 6)
    assert vigil_report.checkpoint(path, 6) is None
    assert capsys.readouterr().err.count("no checkpoint at step") == 4
    assert [entry.name for entry in reporting.iterdir()] == ["step-6"]


def test_the_facts_of_a_checkpoint_can_be_read_again(reporting: Path, tmp_path: Path) -> None:
    """Else it would look saved, and no start would ever go on from it."""
    samples: Any = 192.0  # as step * batch may well be
    assert vigil_report.checkpoint(_file(tmp_path), 6, consumed_samples=samples)
    assert manifest.check(reporting / "step-6").consumed_samples == 192
    assert vigil_report.checkpoint(_file(tmp_path), -1) is None
    assert vigil_report.checkpoint(_file(tmp_path), 7, consumed_samples=-1) is None


class _Several:
    """Raises as torch does for a tensor of several numbers."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


def test_invalid_values_are_reported_and_do_no_harm(
    reporting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several: Any = _Several()
    nothing: Any = None
    for step in range(2):
        vigil_report.log(step, loss=several)
        vigil_report.progress(step, nothing)
    assert vigil_report.checkpoint(_file(tmp_path), nothing) is None
    loss, progress, checkpoint = capsys.readouterr().err.splitlines()
    assert loss == "vigil_report: loss at step 0 is not a number under a plain name; skipped"
    assert progress == "vigil_report: progress(0, None) are not two numbers; skipped"
    assert "no checkpoint at step None" in checkpoint


def test_a_log_on_a_full_disk_hurts_nobody(reporting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint finds no room, and neither may the log line about it."""
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert vigil_report.checkpoint(tmp_path / "missing.pt", 5) is None


def test_a_step_of_another_line_keeps_its_data(
    reporting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vigil_report.checkpoint(_file(tmp_path, data=b"old"), 6)
    monkeypatch.setenv("VIGIL_GENERATION", "4")
    (tmp_path / "job" / "GENERATION").write_text("4\n")
    assert vigil_report.checkpoint(_file(tmp_path, data=b"new"), 6)
    assert (reporting / "step-6.g3" / "model.pt").read_bytes() == b"old"
    assert (reporting / "step-6" / "model.pt").read_bytes() == b"new"


def test_an_older_launch_commits_nothing(reporting: Path, tmp_path: Path) -> None:
    (tmp_path / "job" / "GENERATION").write_text("9\n")
    assert vigil_report.checkpoint(_file(tmp_path), 6) is None
    assert not list(reporting.glob("step-*"))


def test_only_rank_0_commits(reporting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert vigil_report.checkpoint(_file(tmp_path), 6) is None
    assert not reporting.exists()


def test_outside_a_job_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIGIL_ATTEMPT_DIR", raising=False)
    vigil_report.log(1, loss=1.0)
    vigil_report.progress(1, 2)
    vigil_report.event("x")
    assert vigil_report.checkpoint(_file(tmp_path), 1) is None
    assert vigil_report.resume_path() is None
    assert not vigil_report.stopping()


def test_it_is_a_single_file_that_needs_only_the_standard_library(tmp_path: Path) -> None:
    shutil.copy(vigil_report.__file__, tmp_path)
    source = "import vigil_report, sys; vigil_report.log(1, loss=2.0); print('training' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {source}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"


def test_a_signal_that_the_script_handles_stays_with_it(reporting: Path) -> None:
    received = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    try:
        vigil_report.log(1, loss=1.0)
        signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert received == [signal.SIGUSR2]


def test_a_file_system_that_errs_stops_nobody(reporting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not vigil_report.stopping()
    reading = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("stop-requested"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return reading(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert not vigil_report.stopping()


def test_where_no_thread_can_be_started_it_is_reported_once(
    reporting: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    vigil_report.log(1, loss=1.0)
    vigil_report.event("odd")
    assert vigil_report.checkpoint("model.pt", 1) is None
    assert capsys.readouterr().err == "vigil_report: nothing is reported: can't start new thread\n"


def test_what_is_committed_is_so_though_the_disk_is_full_then(
    reporting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job" / "attempt-1" / "stop-requested").touch()
    write = vigil_report._write_durable

    def full(path: Path, data: bytes) -> None:
        if path.name == "stopped.json":
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(vigil_report, "_write_durable", full)
    assert vigil_report.checkpoint(_file(tmp_path), 3) == reporting / "step-3"
    assert manifest.check(reporting / "step-3").step == 3


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, (3, 4)),  # plain srun
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (1, 2)),  # torchrun in it
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "SLURM_PROCID": "1"}, (5, 8)),
        ({"RANK": "", "SLURM_PROCID": "no number"}, (0, 1)),
    ],
)
def test_the_rank_comes_from_whatever_started_the_process(
    variables: dict[str, str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", *(key for key in os.environ if key.startswith(("SLURM_", "OMPI_", "PMI_")))):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (vigil_report._rank(), vigil_report._world_size()) == expected
