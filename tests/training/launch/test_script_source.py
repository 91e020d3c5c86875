"""What a script job is to run: its entry, its interpreter, one commit from git."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.repositories import git
from tests.training.launching import Run
from tests.waiting import PATIENCE_S
from training.launch import script
from training.launch.attempt import Attempt
from training.launch.plan import BadPlan, Plan, Script


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "job" / "code").mkdir(parents=True)
    (tmp_path / "job" / "code" / "train.py").write_text("")
    (tmp_path / "job" / "attempt-1").mkdir()
    return _plan(tmp_path)


def _plan(run_dir: Path, **told: str) -> Plan:
    about = Script(**{"entry": "train.py", **told})  # type: ignore[arg-type]
    return Plan(run_dir=run_dir, scheduler_id="1", restart_count=0, node="n", script=about)


def _prepare(plan: Plan) -> tuple[str, ...]:
    return script.prepare(plan, Attempt(plan.job_dir / "attempt-1", 1)).arguments


def test_the_entry_stays_inside_the_code(plan: Plan) -> None:
    code = plan.job_dir / "code"
    (plan.job_dir / "outside.py").write_text("")
    (code / "link.py").symlink_to("../outside.py")
    (code / "src").mkdir()
    (code / "src" / "a.py").write_text("")
    assert _prepare(_plan(plan.run_dir, entry="src/a.py"))[2] == str(code / "src" / "a.py")
    for entry in ("../outside.py", "link.py", str(plan.job_dir / "outside.py"), "src/../../outside.py", "."):
        with pytest.raises(BadPlan, match="leads out"):
            _prepare(_plan(plan.run_dir, entry=entry))
    with pytest.raises(BadPlan, match="is not in the directory"):
        _prepare(_plan(plan.run_dir, entry="src"))
    shutil.rmtree(code)
    with pytest.raises(BadPlan, match="never put there"):
        _prepare(plan)


def test_the_interpreter_is_a_path_or_an_environment(plan: Plan, tmp_path: Path) -> None:
    assert _prepare(plan)[0] == sys.executable
    assert _prepare(_plan(plan.run_dir, python=sys.executable))[0] == sys.executable
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    assert _prepare(_plan(plan.run_dir, python=str(tmp_path / "venv")))[0] == str(tmp_path / "venv" / "bin" / "python")
    with pytest.raises(BadPlan, match="no interpreter on this node"):
        _prepare(_plan(plan.run_dir, python="/nowhere/python"))
    (tmp_path / "closed").write_text("")
    (tmp_path / "closed").chmod(0o644)
    with pytest.raises(BadPlan, match="cannot be run: user [0-9]+ may not run .*/closed, which is -rw-r--r--"):
        _prepare(_plan(plan.run_dir, python=str(tmp_path / "closed")))


# Git.


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits, a tag on the first, a hook, a submodule entry."""
    monkeypatch.setenv("VIGIL_GIT_FILE", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "train.py").write_text("print(1)\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    git(folder, "tag", "v1")
    (folder / "train.py").write_text("print(2)\n")
    (folder / ".gitmodules").write_text('[submodule "x"]\n\tpath = x\n\turl = file:///nowhere\n')
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "two")
    return folder


@pytest.mark.parametrize(("ref", "text"), [("main", "print(2)\n"), ("v1", "print(1)\n"), ("", "print(2)\n")])
def test_git_brings_one_commit_as_plain_files(repository: Path, tmp_path: Path, ref: str, text: str) -> None:
    target = tmp_path / "code"
    script.fetch(f"file://{repository}", ref, target)
    assert (target / "train.py").read_text() == text
    assert not (target / ".git").exists()
    about = json.loads((tmp_path / "code.json").read_text())
    assert about["commit"] == git(repository, "rev-parse", f"{ref or 'main'}^{{commit}}")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".code")] == []


def test_git_brings_a_commit_by_its_id(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "v1^{commit}")
    script.fetch(f"file://{repository}", commit, tmp_path / "code")
    assert (tmp_path / "code" / "train.py").read_text() == "print(1)\n"


def test_git_runs_nothing_of_anybodys(repository: Path, tmp_path: Path) -> None:
    """Neither a hook from a template nor a filter that the repository asks for."""
    template = tmp_path / "template" / "hooks"
    template.mkdir(parents=True)
    for hook in ("post-checkout", "reference-transaction"):
        (template / hook).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (template / hook).chmod(0o755)
    (tmp_path / ".gitconfig").write_text(
        f"[init]\n\ttemplateDir = {template.parent}\n[core]\n\thooksPath = {template}\n[submodule]\n\trecurse = true\n"
    )
    script.fetch(f"file://{repository}", "main", tmp_path / "code")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "url", ["http://example.org/x", "git://example.org/x", "ext::sh -c true", "/etc", "-u", "file:///etc"]
)
def test_other_addresses_are_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIGIL_GIT_FILE", raising=False)
    with pytest.raises(BadPlan, match="only https:// and ssh://"):
        script.fetch(url, "main", tmp_path / "code")


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("no-such-branch", "cannot be fetched: fatal: couldn't find remote ref no-such-branch"),
        ("0123456789", "cannot be fetched: fatal: 0123456789: not a valid SHA1"),
        ("--upload-pack=touch", "script.ref = '--upload-pack=touch' is no branch, tag or commit"),
    ],
)
def test_what_the_repository_has_not_is_named(repository: Path, tmp_path: Path, ref: str, words: str) -> None:
    with pytest.raises(BadPlan, match=re.escape(words)):
        script.fetch(f"file://{repository}", ref, tmp_path / "code")
    assert not (tmp_path / "code").exists()


def test_git_is_bounded(repository: Path, tmp_path: Path) -> None:
    (repository / "big").write_bytes(os.urandom(3_000_000))
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "big")
    with pytest.raises(BadPlan, match="larger than 1 MiB"):
        script.fetch(f"file://{repository}", "main", tmp_path / "code", limit=2**20)
    with pytest.raises(BadPlan, match="it took too long"):
        script.fetch(f"file://{repository}", "main", tmp_path / "code", seconds=0.0)
    with pytest.raises(BadPlan, match="asked to stop"):
        script.fetch(f"file://{repository}", "main", tmp_path / "code", stopping=lambda: True)
    assert not (tmp_path / "code").exists()


@pytest.mark.slow
def test_a_job_from_git_runs(run: Run, repository: Path) -> None:
    run.describe(f'kind = "script"\n[script]\ngit = "file://{repository}"\nref = "main"\n')
    assert run.launch().wait(PATIENCE_S) == 0
    assert run.rank_log() == "2\n"
    shutil.rmtree(repository)
    assert run.launch(restart=1).wait(PATIENCE_S) == 0  # the same snapshot again
