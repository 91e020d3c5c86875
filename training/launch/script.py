"""Run the user's own program as ranks: its entry, its interpreter, its environment (protocols.md §8)."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from training.interpreter import HEAD_BYTES, ITSELF, PYTHON, NotAProgram, interpreter_of
from training.launch.attempt import Attempt
from training.launch.environment import RankCommand
from training.launch.plan import BadPlan, LaunchPlan


def prepare(plan: LaunchPlan, attempt: Attempt) -> RankCommand:
    """Return the command of a rank, once the code is there (training.launch.snapshot). Raises BadPlan."""
    assert plan.script is not None
    code = plan.code_dir
    entry = _entry(code, plan.script.entry)
    reporting = _copy_reporting(attempt.folder)
    variables = {**plan.env, **plan.script.env}
    user_path = variables.get("PYTHONPATH", "")
    environment = {**variables, "PYTHONPATH": f"{reporting}:{user_path}" if user_path else str(reporting)}
    python = _python(plan.script.python)
    interpreter = _interpreter(entry, plan.script.entry)
    if interpreter == PYTHON:
        return RankCommand((python, "-u", str(entry), *plan.script.args), code, environment)
    environment["PATH"] = _path_with(python, variables, is_chosen=bool(plan.script.python))
    return RankCommand((*interpreter, str(entry), *plan.script.args), code, environment)


def _path_with(python: str, variables: Mapping[str, str], *, is_chosen: bool) -> str:
    """Return PATH for a shell script: `python` is the chosen interpreter, else what PATH has, else the job's own."""
    path, folder = variables.get("PATH") or os.environ.get("PATH", os.defpath), str(Path(python).parent)
    return f"{folder}:{path}" if is_chosen else f"{path}:{folder}"


def _interpreter(path: Path, name: str) -> tuple[str, ...]:
    """Return the command that runs the entry. Raises BadPlan if there is none or it is not on this node."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    try:
        interpreter = interpreter_of(name, head, is_executable=os.access(path, os.X_OK))
    except NotAProgram as error:
        raise BadPlan(f"script.entry: {error}") from None
    if interpreter not in (PYTHON, ITSELF) and not os.access(interpreter[0], os.X_OK):
        raise BadPlan(f"script.entry = {name!r} begins with #!{interpreter[0]}, which is not on this node")
    return interpreter


def _entry(code: Path, name: str) -> Path:
    """Return the path of the program, which must be inside the code folder even after resolving links."""
    root, path = code.resolve(), (code / name).resolve()
    if not path.is_relative_to(root) or path == root:
        raise BadPlan(f"script.entry = {name!r} leads out of the directory; name a file inside it")
    if not path.is_file():
        there = ", ".join(sorted(entry.name for entry in root.glob("*.py"))[:5]) or "no Python file"
        raise BadPlan(f"script.entry = {name!r} is not in the directory (it has {there})")
    return path


def _python(name: str) -> str:
    """Return the interpreter's path: given as a file or a virtual environment's folder, else our own."""
    if not name:
        return sys.executable
    path = Path(name)
    if os.path.isdir(path):
        path = path / "bin" / "python"
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        if problem := _permission_problem(path):
            raise BadPlan(f"script.python = {name!r} cannot be run: {problem}")
        raise BadPlan(f"script.python = {name!r} is neither an interpreter on this node nor a virtual environment")
    return str(path)  # not resolved: the link's location is what selects the virtual environment


def _permission_problem(path: Path) -> str:
    """Describe which permission is missing on the way to a path; "" where permissions are not the problem."""
    existing = Path(os.path.realpath(path))
    is_file = os.path.isfile(existing)
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    if os.access(existing, os.X_OK) or not (is_file or os.path.isdir(existing)):
        return ""
    status = existing.stat()
    verb = "run" if is_file else "enter"
    mode = f"{stat.filemode(status.st_mode)}, of user {status.st_uid} and group {status.st_gid}"
    return f"user {os.geteuid()} may not {verb} {existing}, which is {mode}. Give them access"


def _copy_reporting(attempt_dir: Path) -> Path:
    """Return a folder with vigil_report.py and nothing else.

    No other module of ours gets onto the script's path.
    """
    import vigil_report

    folder = attempt_dir / "lib"
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{os.getpid()}"
    shutil.copyfile(vigil_report.__file__, temporary)
    os.replace(temporary, folder / "vigil_report.py")
    return folder
