"""Test what a script job runs: its entry and its interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from training.launch import script
from training.launch.attempt import Attempt
from training.launch.plan import BadPlan, LaunchPlan, ScriptPlan


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    (tmp_path / "job" / "code").mkdir(parents=True)
    (tmp_path / "job" / "code" / "train.py").write_text("")
    (tmp_path / "job" / "attempt-1").mkdir()
    return _plan(tmp_path)


def _plan(run_dir: Path, **options: str) -> LaunchPlan:
    about = ScriptPlan(**{"entry": "train.py", **options})  # type: ignore[arg-type]
    return LaunchPlan(run_dir=run_dir, scheduler_id="1", restart_count=0, node="n", script=about)


def _prepare(plan: LaunchPlan) -> tuple[str, ...]:
    return script.prepare(plan, Attempt(plan.job_dir / "attempt-1", 1)).arguments


def test_the_entry_stays_inside_the_code(plan: LaunchPlan) -> None:
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


def test_the_interpreter_is_a_path_or_an_environment(plan: LaunchPlan, tmp_path: Path) -> None:
    assert _prepare(plan)[0] == sys.executable
    assert _prepare(_plan(plan.run_dir, python=sys.executable))[0] == sys.executable
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    assert _prepare(_plan(plan.run_dir, python=str(tmp_path / "venv")))[0] == str(tmp_path / "venv" / "bin" / "python")
    with pytest.raises(BadPlan, match="neither an interpreter on this node"):
        _prepare(_plan(plan.run_dir, python="/nowhere/python"))
    (tmp_path / "closed").write_text("")
    (tmp_path / "closed").chmod(0o644)
    with pytest.raises(BadPlan, match="cannot be run: user [0-9]+ may not run .*/closed, which is -rw-r--r--"):
        _prepare(_plan(plan.run_dir, python=str(tmp_path / "closed")))
