"""Test that a trial imports Vigil's packages from where this process did, whatever the folder and PYTHONPATH hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosis.trial.subprocess_trial import try_entry

ENTRY = {
    "name": "storage.ours_down", "role": "root", "cause": "storage.io", "source": "our own mounter 2.4, mount.c",
    "pattern": r"ourfs: volume \S+ went away after \d+ ms",
    "example": "[rank3]: ourfs: volume scratch-07 went away after 512 ms",
    "look_alike": "ourfs: volume scratch-07 came back after 512 ms", "advice": "Call the storage team.",
}  # fmt: skip


@pytest.mark.parametrize("is_working_directory", [True, False])
def test_packages_of_the_same_name_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_working_directory: bool
) -> None:
    other = tmp_path / "diagnosis"
    other.mkdir()
    (other / "__init__.py").write_text('raise SystemExit("not Vigil")')
    if is_working_directory:
        monkeypatch.chdir(tmp_path)
    else:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    trial = try_entry(ENTRY)
    assert trial.is_fit, trial.findings
