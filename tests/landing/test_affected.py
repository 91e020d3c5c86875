"""Test which tests a landing runs: those a change can affect, the first of other files, a quarter of the rest."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.landing import affected
from tests.landing.affected import affected_by, selected, since_last_full_run


def files(*changed: str) -> set[str]:
    found = affected_by(changed)
    assert found is not None
    return found


def has(found: set[str], folder: str) -> bool:
    return any(file.startswith(folder) for file in found)


def test_a_package_affects_its_tests_and_those_of_packages_that_import_it() -> None:
    found = files("jobs/waiting/pending.py")
    assert has(found, "tests/jobs/waiting/")
    assert "tests/jobs/pages/test_job.py" in found, "jobs.views imports jobs.waiting"
    assert not has(found, "tests/training/")
    assert "tests/test_layers.py" in found, "the tree's layers are tested at every landing"


def test_the_trainer_affects_the_site_only_where_the_site_imports_it() -> None:
    assert not has(files("training/guards/watchdog.py"), "tests/jobs/pages/")
    assert has(files("training/config/read.py"), "tests/jobs/spec/")


def test_processes_that_a_test_starts_affect_it() -> None:
    assert "tests/portal/test_up_kill.py" in files("console/worker.py")
    assert "tests/portal/test_up_kill.py" in files("portal/run/heartbeat.py")
    assert "tests/slurm/test_end_to_end.py" in files("console/site/prepare.py")
    assert "tests/training/checkpoint/test_faults.py" in files("training/trainer.py")


def test_files_other_than_python_affect_the_packages_that_read_them() -> None:
    assert has(files("templates/jobs/job.html"), "tests/jobs/pages/")
    assert has(files("static/js/chart.js"), "tests/browser/")
    assert has(files("diagnosis/catalogue/nccl.toml"), "tests/jobs/postmortem/")
    assert has(files("tests/nodes/slurm/recorded/any.json"), "tests/nodes/slurm/")
    assert has(files("tests/logs/gpu-ecc-trainer/case.toml"), "tests/diagnosis/")
    assert has(files("tests/nvml/nvml.c"), "tests/gpus/")


def test_a_test_and_a_helper_of_tests_affect_themselves_and_their_users() -> None:
    assert "tests/training/test_step.py" in files("tests/training/test_step.py")
    assert "tests/vigil_cli/test_cluster.py" in files("tests/vigil_cli/commands.py")


@pytest.mark.parametrize("path", ["pyproject.toml", "requirements-dev.lock", "tests/conftest.py", "portal/settings.py"])
def test_some_changes_affect_everything(path: str) -> None:
    assert affected_by([path]) is None


def test_of_other_files_the_first_test_runs_and_a_quarter_of_the_rest() -> None:
    names = [f"tests/{file}/test_{file}.py::test_{number}" for file in "ab" for number in range(40)]
    parts = [selected(names, {"tests/a/test_a.py"}, f"{part}/4") for part in range(4)]
    for part in parts:
        assert {name for name in names if "/a/" in name} | {"tests/b/test_b.py::test_0"} <= part
        assert len(part) < 60
    assert set.union(*parts) == {*names}
    assert selected(names, None, "0/4") == {*names}


def test_a_quarter_of_other_slow_files_runs_whole_and_a_test_of_each_folder() -> None:
    names = [
        f"tests/{folder}/test_{file}.py::test_{number}" for folder in "ab" for file in range(20) for number in range(5)
    ]
    affected_file = "tests/b/test_3.py"
    parts = [selected(names, {affected_file}, f"{part}/4", slow=names) for part in range(4)]
    for part in parts:
        assert {name for name in names if name.startswith(affected_file)} <= part
        assert {"tests/a/test_0.py::test_0", "tests/b/test_0.py::test_0"} <= part
        assert len(part) < 100
        by_file = Counter(name.partition("::")[0] for name in part)
        assert {file for file, tests in by_file.items() if tests < 5} <= {"tests/a/test_0.py", "tests/b/test_0.py"}
    assert set.union(*parts) == {*names}


def test_the_last_full_run_is_a_commit_of_this_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    monkeypatch.setattr(affected, "RECORD", tmp_path / "fully-tested")
    assert since_last_full_run() is None, "there was none"
    for words in (["init", "-q"], ["config", "user.email", "a@b.c"], ["config", "user.name", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    for number in range(2):
        (tmp_path / "README.md").write_text(str(number))
        subprocess.run(["git", "add", "README.md"], cwd=tmp_path, check=True)
        subprocess.run(["git", "commit", "-qm", "a"], cwd=tmp_path, check=True)
        if number == 0:
            affected.record()
    assert affected.changed_since((tmp_path / "fully-tested").read_text().strip()) == {"README.md"}
    assert affected.changed_since("0" * 40) is None
    assert since_last_full_run() is not None
