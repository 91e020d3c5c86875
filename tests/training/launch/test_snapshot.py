"""Test the snapshot of a user's code: as uploaded, or one commit from git."""

from __future__ import annotations

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.repositories import git
from tests.training.launching import Run
from tests.waiting import PATIENCE_S
from training.launch import snapshot
from training.launch.plan import BadPlan, CodePlan, LaunchPlan

TABLES = pytest.mark.parametrize("table", ["script", "client"])


def _fetch(url: str, ref: str, target: Path, *, table: str = "script", **bounds: Any) -> None:
    snapshot.fetch(CodePlan(table=table, git=url, ref=ref), target, **bounds)


@TABLES
def test_what_was_never_put_there_is_missed(tmp_path: Path, table: str) -> None:
    plan = LaunchPlan(run_dir=tmp_path, scheduler_id="1", restart_count=0, node="n", code=CodePlan(table=table))
    with pytest.raises(BadPlan, match="never put there"):
        snapshot.ensure_code(plan)
    plan.code_dir.mkdir(parents=True)
    snapshot.ensure_code(plan)


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
def test_git_fetches_a_single_commit_as_plain_files(repository: Path, tmp_path: Path, ref: str, text: str) -> None:
    target = tmp_path / "code"
    _fetch(f"file://{repository}", ref, target)
    assert (target / "train.py").read_text() == text
    assert not (target / ".git").exists()
    about = json.loads((tmp_path / "code.json").read_text())
    assert about["commit"] == git(repository, "rev-parse", f"{ref or 'main'}^{{commit}}")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".code")] == []


def test_git_brings_a_commit_by_its_id(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "v1^{commit}")
    _fetch(f"file://{repository}", commit, tmp_path / "code")
    assert (tmp_path / "code" / "train.py").read_text() == "print(1)\n"


def test_git_runs_nothing_of_anybodys(repository: Path, tmp_path: Path) -> None:
    """Neither a hook from a template nor a filter that the repository configures is run."""
    template = tmp_path / "template" / "hooks"
    template.mkdir(parents=True)
    for hook in ("post-checkout", "reference-transaction"):
        (template / hook).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (template / hook).chmod(0o755)
    (tmp_path / ".gitconfig").write_text(
        f"[init]\n\ttemplateDir = {template.parent}\n[core]\n\thooksPath = {template}\n[submodule]\n\trecurse = true\n"
    )
    _fetch(f"file://{repository}", "main", tmp_path / "code")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "url", ["http://example.org/x", "git://example.org/x", "ext::sh -c true", "/etc", "-u", "file:///etc"]
)
@TABLES
def test_other_addresses_are_refused(url: str, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIGIL_GIT_FILE", raising=False)
    with pytest.raises(BadPlan, match=rf"^{table}\.git = .*only https:// and ssh://"):
        _fetch(url, "main", tmp_path / "code", table=table)


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("no-such-branch", "cannot be fetched: fatal: couldn't find remote ref no-such-branch"),
        ("0123456789", "cannot be fetched: fatal: 0123456789: not a valid SHA1"),
        ("--upload-pack=touch", "script.ref = '--upload-pack=touch' is not a branch, tag or commit"),
    ],
)
def test_what_the_repository_has_not_is_named(repository: Path, tmp_path: Path, ref: str, words: str) -> None:
    with pytest.raises(BadPlan, match=re.escape(words)):
        _fetch(f"file://{repository}", ref, tmp_path / "code")
    assert not (tmp_path / "code").exists()


def test_git_is_bounded(repository: Path, tmp_path: Path) -> None:
    (repository / "big").write_bytes(os.urandom(3_000_000))
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "big")
    with pytest.raises(BadPlan, match="larger than 1 MiB"):
        _fetch(f"file://{repository}", "main", tmp_path / "code", limit=2**20)
    with pytest.raises(BadPlan, match="it took too long"):
        _fetch(f"file://{repository}", "main", tmp_path / "code", seconds=0.0)
    with pytest.raises(BadPlan, match="asked to stop"):
        _fetch(f"file://{repository}", "main", tmp_path / "code", stopping=lambda: True)
    assert not (tmp_path / "code").exists()


@TABLES
def test_the_first_node_fetches_and_the_others_wait(repository: Path, tmp_path: Path, table: str) -> None:
    for number, (ref, text) in enumerate({"nowhere": "couldn't find remote ref", "v1": ""}.items()):
        code = CodePlan(table=table, git=f"file://{repository}", ref=ref)
        plans = [
            LaunchPlan(
                run_dir=tmp_path, scheduler_id="1", restart_count=number, node="n", nodes=2, node_rank=rank, code=code
            )
            for rank in (1, 0)
        ]
        plans[0].job_dir.mkdir(exist_ok=True)
        with ThreadPoolExecutor() as nodes:
            done = [nodes.submit(snapshot.ensure_code, plan) for plan in plans]
            for item in done:
                with pytest.raises(BadPlan, match=f"^{table}.git: .*{text}") if text else nullcontext():
                    item.result(PATIENCE_S)
    assert (tmp_path / "job" / "code" / "train.py").read_text() == "print(1)\n"


@pytest.mark.slow
def test_clients_from_git_are_there_before_the_ranks(run: Run, repository: Path) -> None:
    run.describe(f'kind = "federated"\n[client]\ngit = "file://{repository}"\nref = "main"\n')
    assert run.launch('{"steps": 3}').wait(PATIENCE_S) == 0, run.log()
    assert (run.path / "job" / "code" / "train.py").read_text() == "print(2)\n"
    assert sorted(run.losses()[0]) == [1, 2, 3], "it is Vigil's own trainer that runs, here a fake one"


@pytest.mark.slow
def test_clients_that_cannot_be_fetched_are_in_the_result(run: Run, repository: Path) -> None:
    run.describe(f'kind = "federated"\n[client]\ngit = "file://{repository}"\nref = "gone"\n')
    assert run.launch("{}").wait(PATIENCE_S) == 2
    assert run.result()["error"].startswith(f"client.git: file://{repository} at gone cannot be fetched")


@pytest.mark.slow
def test_a_job_from_git_runs(run: Run, repository: Path) -> None:
    run.describe(f'kind = "script"\n[script]\ngit = "file://{repository}"\nref = "main"\n')
    assert run.launch().wait(PATIENCE_S) == 0
    assert run.rank_log() == "2\n"
    shutil.rmtree(repository)
    assert run.launch(restart=1).wait(PATIENCE_S) == 0  # the same snapshot again
