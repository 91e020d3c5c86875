"""Test capturing an attempt's environment: next to the ranks, of their interpreter, and without secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.training.launching import Run
from tests.waiting import PATIENCE_S, until
from training.config.run_config import RunConfig
from training.launch import capturing
from training.launch.attempt import Attempt
from training.launch.capturing import EnvironmentCapture
from training.launch.environment import RankCommand
from training.launch.plan import CodePlan, LaunchPlan, ScriptPlan, read_plan
from training.provenance import capture, machine


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment of somebody's, with what would run if its `site` were let."""
    place = tmp_path / "theirs"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    packages = next(place.glob("lib/python*/site-packages"))
    for name in (
        "Foo_Bar-1.2.dist-info",
        "torch-2.9.1+cu128.dist-info",
        "old-0.1-py3.11.egg-info",
        "foo",
        "x.dist-info",
    ):
        (packages / name).mkdir()
    (packages / "torch").mkdir()
    (packages / "torch" / "version.py").write_text(
        "__version__ = '2.9.1+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n"
    )
    run_me = f"open({str(tmp_path / 'ran')!r}, 'w')"
    (packages / "evil.pth").write_text(f"import os; {run_me}\n")
    (packages / "sitecustomize.py").write_text(f"{run_me}\n")
    return place


def _environment(run: Run, number: int = 1) -> dict[str, Any]:
    text = (run.attempt(number) / "environment.json").read_text()
    assert len(text) <= capture.MAX_BYTES
    found: dict[str, Any] = json.loads(text)
    return found


def _plan(run_dir: Path, *, table: str = "script", **options: Any) -> LaunchPlan:
    code = CodePlan(table=table, **{name: options.pop(name) for name in ("git", "ref") if name in options})
    script = ScriptPlan(entry="x.py", **options) if table == "script" else None
    return LaunchPlan(run_dir=run_dir, scheduler_id="1", restart_count=0, node="dgx01", code=code, script=script)


def _capture(plan: LaunchPlan, python: Path | str = sys.executable, path: str = "") -> dict[str, Any]:
    return capture.capture(plan, python=str(python), path=path, scratch=plan.run_dir)


@pytest.mark.slow
def test_an_attempt_that_fails_at_once_still_reports_its_environment(run: Run) -> None:
    script = '[script.env]\nMY_TOKEN = "hush-hush"\nALPHA = "1"\n'
    assert run.script("import no_such_module\n", launch="in_place = 0", script=script).wait(PATIENCE_S) == 1
    report = _environment(run)
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["executable"] == sys.executable
    assert report["packages"]["torch"] == report["torch"]
    assert (report["torch_for"], report["node"], report["cpus"]) == ("CPU", "dgx01", len(os.sched_getaffinity(0)))
    assert report["kernel"].startswith("Linux ")
    assert report["variables"] == ["ALPHA", "MY_TOKEN"]
    assert "hush" not in json.dumps(report)
    assert {"gpus", "driver", "cuda"} & set(report) <= set(machine.gpus(None)), "nothing is invented"
    assert (run.attempt() / "logs" / "capture.log").read_text() == ""
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_run_captures_once_an_attempt(run: Run) -> None:
    accident = "import os, time\ntime.sleep(0.1)\nos.environ['VIGIL_INCARNATION'] == '0' and os.kill(os.getpid(), 9)\n"
    assert run.script(accident).wait(PATIENCE_S) == 0
    first = _environment(run)
    assert len(run.events("incarnation.started")) == 2
    assert run.launch(restart=1).wait(PATIENCE_S) == 0
    assert _environment(run, 2)["captured_at"] > first["captured_at"]
    assert _environment(run) == first


def test_another_interpreter_is_inspected_without_running_what_is_installed(tmp_path: Path, environment: Path) -> None:
    report = _capture(_plan(tmp_path), environment / "bin" / "python")
    assert report["packages"] == {"foo-bar": "1.2", "torch": "2.9.1+cu128", "old": "0.1"}
    assert (report["torch"], report["torch_for"]) == ("2.9.1+cu128", "CUDA 12.8")
    assert report["executable"] == str(environment / "bin" / "python")
    assert not (tmp_path / "ran").exists()
    folder = tmp_path / "mine"
    (folder / "foo_bar-9.dist-info").mkdir(parents=True)
    report = _capture(_plan(tmp_path), environment / "bin" / "python", f"/nowhere:{folder}")
    assert report["packages"]["foo-bar"] == "9", "PYTHONPATH comes first"


@pytest.mark.parametrize("does", ["exit 3", "echo not json", 'echo "{}"', "exec sleep 600", "exec cat /dev/zero"])
def test_only_the_packages_are_missing_when_an_interpreter_does_not_answer(
    tmp_path: Path, does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "PYTHON_SECONDS", 0.3)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nulimit -f 64\n{does}\n")
    python.chmod(0o755)
    report = _capture(_plan(tmp_path), python)
    assert "packages" not in report
    assert {"kernel", "vigil", "vigil_digest", "memory_gib"} <= set(report)
    assert [path.name for path in tmp_path.iterdir()] == ["python"], "nothing is left lying about"


def test_too_many_packages_are_cut_and_counted(tmp_path: Path) -> None:
    packages = {f"package-{n:05}": "1.0" for n in range(20_000)}
    report = capture._bounded({"python": "3", "packages": packages})
    assert len(json.dumps(report)) <= capture.MAX_BYTES
    assert report["packages_left_out"] + len(report["packages"]) == 20_000


def test_the_code_is_named_without_its_password(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    commit = "1234567890" * 4
    (tmp_path / "job" / "code.json").write_text(json.dumps({"git": "x", "ref": "main", "commit": commit}))
    report = _capture(_plan(tmp_path, git="https://oskar:hush@example.org/a/b.git", ref="main", env={"B": "", "A": ""}))
    assert (report["git"], report["ref"], report["commit"]) == ("https://example.org/a/b.git", "main", commit)
    assert report["variables"] == ["A", "B"]
    assert "hush" not in json.dumps(report)
    assert capture.without_password("ssh://git:hush@example.org:22/a") == "ssh://git@example.org:22/a"


@pytest.mark.parametrize("table", ["script", "client"])
def test_an_upload_is_named_by_its_digest_and_commit(tmp_path: Path, table: str) -> None:
    (tmp_path / "portal").mkdir()
    sent = {"digest": "ab" * 32, "commit": "12" * 20, "dirty": True, "more": 1}
    (tmp_path / "portal" / "code.json").write_text(json.dumps(sent))
    report = _capture(_plan(tmp_path, table=table))
    assert (report["digest"], report["commit"], report["dirty"]) == ("ab" * 32, "12" * 20, True)
    assert ("variables" in report) is (table == "script"), "variables are a script's"


def test_a_trainers_run_has_its_configurations_hash(run: Run) -> None:
    run.describe('name = "x"\nkind = "distributed"\n[run]\nrecipe = "language"\nsteps = 7\n')
    report = _capture(read_plan(run.path, {}))
    assert report["config_hash"] == RunConfig(recipe="language", steps=7).hash()
    assert "variables" not in report


@pytest.mark.parametrize("packed", [False, True])
def test_the_commit_of_a_checkout_is_read_without_git(tmp_path: Path, packed: bool) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@t")
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q", "-b", "main")
    git("commit", "-q", "--allow-empty", "-m", "one")
    git("worktree", "add", "-q", "-b", "other", "beside")
    if packed:
        git("pack-refs", "--all")
    commit = git("rev-parse", "HEAD").strip()
    assert capture._head_commit(tmp_path / ".git") == commit
    assert capture._head_commit(tmp_path / "beside" / ".git") == commit
    git("checkout", "-q", "--detach")
    assert capture._head_commit(tmp_path / ".git") == commit
    assert capture._head_commit(tmp_path / "none" / ".git") == ""


@pytest.mark.lengthy
def test_a_capture_that_hangs_is_ended_with_its_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "FINISH_SECONDS", 0.0)
    monkeypatch.setattr(capturing, "AFTER_SECONDS", 0.0)
    (tmp_path / "portal").mkdir()
    (tmp_path / "portal" / "run.toml").write_text('kind = "script"\n[script]\nentry = "x.py"\n')
    folder = tmp_path / "job" / "attempt-1"
    (folder / "logs").mkdir(parents=True)
    (tmp_path / "python").write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    (tmp_path / "python").chmod(0o755)
    command = RankCommand((str(tmp_path / "python"),), folder)
    environment_capture = EnvironmentCapture(_plan(tmp_path), Attempt(folder, 1), command)
    environment_capture.begin()
    environment_capture.poll()
    pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    assert environment_capture.pid
    assert psutil.Process(environment_capture.pid).nice() == capturing.LOWEST_PRIORITY
    began = time.monotonic()
    environment_capture.finish()
    assert time.monotonic() - began < PATIENCE_S / 2
    assert environment_capture.pid is None
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert not (folder / "environment.json").exists()
