"""Somebody's own program as ranks: its entry, its interpreter, its environment (protocols.md §8)."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from training.launch.attempt import Attempt
from training.launch.environment import RankCommand
from training.launch.plan import BadPlan, Plan
from training.program import HEAD_BYTES, ITSELF, PYTHON, NotAProgram, interpreter_of


def prepare(plan: Plan, attempt: Attempt) -> RankCommand:
    """The command of a rank once the code is there (training.launch.snapshot), or BadPlan with what to change."""
    assert plan.script is not None
    code = plan.code_dir
    entry = _entry(code, plan.script.entry)
    reporting = _copy_reporting(attempt.folder)
    variables = {**plan.env, **plan.script.env}
    own = variables.get("PYTHONPATH", "")
    environment = {**variables, "PYTHONPATH": f"{reporting}:{own}" if own else str(reporting)}
    python = _python(plan.script.python)
    words = _interpreter(entry, plan.script.entry)
    if words == PYTHON:
        return RankCommand((python, "-u", str(entry), *plan.script.args), code, environment)
    environment["PATH"] = _path_with(python, variables, is_chosen=bool(plan.script.python))
    return RankCommand((*words, str(entry), *plan.script.args), code, environment)


def _path_with(python: str, variables: Mapping[str, str], *, is_chosen: bool) -> str:
    """Return PATH for a shell script: `python` is the chosen interpreter, else what PATH has, else the job's own."""
    path, folder = variables.get("PATH") or os.environ.get("PATH", os.defpath), str(Path(python).parent)
    return f"{folder}:{path}" if is_chosen else f"{path}:{folder}"


def _interpreter(path: Path, name: str) -> tuple[str, ...]:
    """Return what runs the entry, or BadPlan with what to write where nothing says it or it is not on this node."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    try:
        words = interpreter_of(name, head, is_executable=os.access(path, os.X_OK))
    except NotAProgram as error:
        raise BadPlan(f"script.entry: {error}") from None
    if words not in (PYTHON, ITSELF) and not os.access(words[0], os.X_OK):
        raise BadPlan(f"script.entry = {name!r} begins with #!{words[0]}, which is not on this node")
    return words


def _entry(code: Path, name: str) -> Path:
    """The program, which must be a file inside the code whatever links say."""
    root, path = code.resolve(), (code / name).resolve()
    if not path.is_relative_to(root) or path == root:
        raise BadPlan(f"script.entry = {name!r} leads out of the directory; name a file inside it")
    if not path.is_file():
        there = ", ".join(sorted(entry.name for entry in root.glob("*.py"))[:5]) or "no Python file"
        raise BadPlan(f"script.entry = {name!r} is not in the directory (it has {there})")
    return path


def _python(name: str) -> str:
    """The interpreter: a path of one, a virtual environment's folder, or ours."""
    if not name:
        return sys.executable
    path = Path(name)
    if os.path.isdir(path):
        path = path / "bin" / "python"
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        if barred := _barred(path):
            raise BadPlan(f"script.python = {name!r} cannot be run: {barred}")
        raise BadPlan(f"script.python = {name!r} is no interpreter on this node, and no virtual environment with one")
    return str(path)  # not resolved: a link's own place is what makes it that environment's interpreter


def _barred(path: Path) -> str:
    """What the job's user may not do there, where it is that; "" where nothing is there."""
    at = Path(os.path.realpath(path))
    is_file = os.path.isfile(at)
    while not os.path.exists(at) and at != at.parent:
        at = at.parent
    if os.access(at, os.X_OK) or not (is_file or os.path.isdir(at)):
        return ""
    found = at.stat()
    verb = "run" if is_file else "enter"
    mode = f"{stat.filemode(found.st_mode)}, of user {found.st_uid} and group {found.st_gid}"
    return f"user {os.geteuid()} may not {verb} {at}, which is {mode}. Open it to them"


def _copy_reporting(attempt_dir: Path) -> Path:
    """A folder with vigil_report.py and nothing else, so that nothing else of ours gets onto the script's path."""
    import vigil_report

    folder = attempt_dir / "lib"
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{os.getpid()}"
    shutil.copyfile(vigil_report.__file__, temporary)
    os.replace(temporary, folder / "vigil_report.py")
    return folder
