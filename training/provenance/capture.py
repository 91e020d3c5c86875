"""Record the environment of an attempt.

    python -P -m training.provenance.capture RUN_DIR ATTEMPT_DIR PYTHON PYTHONPATH

Started by the launcher on the first node once the ranks run, with the interpreter that they use. Facts only, and
nothing secret: names of the variables that the specification sets, repository addresses without passwords. A part that
cannot be determined is left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from training import run_file
from training.attempt.files import read_json, write_json
from training.launch.capturing import FILE
from training.launch.plan import LaunchPlan, read_plan
from training.launch.ranks import inherited
from training.provenance import installed, machine

VERSION = 1
MAX_BYTES = 256 * 1024
PYTHON_SECONDS = 20.0
CPU_SECONDS = 30
FILE_BYTES = 1 << 20  # limit for any file of this process and the interpreter that it runs
MAX_VARIABLES = 200
SOURCE = Path(__file__).resolve().parents[2]
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def main(arguments: list[str]) -> int:
    run_dir, attempt_dir, python, path = Path(arguments[0]), Path(arguments[1]), arguments[2], arguments[3]
    _limit_resources()
    plan = read_plan(run_dir)
    captured = capture(plan, python=python, path=path, scratch=attempt_dir)
    write_json(attempt_dir / FILE, captured)
    if gpus := machine.gpus(os.environ.get("CUDA_VISIBLE_DEVICES")):  # last: a driver may not answer
        write_json(attempt_dir / FILE, _bounded({**captured, **gpus}))
    return 0


def capture(plan: LaunchPlan, *, python: str, path: str, scratch: Path) -> dict[str, Any]:
    """Return everything but the GPUs, in at most MAX_BYTES of JSON."""
    parts: list[Callable[[], dict[str, Any]]] = [
        partial(interpreter, plan, python, path, scratch),
        machine.system,
        machine.processors,
        vigil,
        partial(code, plan),
        partial(settings, plan),
    ]
    captured: dict[str, Any] = {"version": VERSION, "captured_at": time.time(), "node": plan.node}
    for part in parts:
        try:
            captured |= part()
        except Exception as error:  # one part that fails leaves the others
            print(f"training.provenance.capture: {error!r}", file=sys.stderr)
    return _bounded(captured)


def interpreter(plan: LaunchPlan, python: str, path: str, scratch: Path) -> dict[str, Any]:
    """Describe the ranks' Python and its packages by running it.

    It runs isolated, without `site`, with limits of time and size.
    """
    spec = plan.script.env if plan.script else {}
    loader_variables = {
        name: spec[name] for name in ("PYTHONUSERBASE", "PYTHONNOUSERSITE", "LD_LIBRARY_PATH") if name in spec
    }
    folders = [folder for folder in path.split(os.pathsep) if folder]
    output = scratch / f".installed.{os.getpid()}"
    try:
        with open(output, "w+b") as file:
            subprocess.run(
                [python, "-I", "-S", installed.__file__, *folders],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={**inherited(), **loader_variables},
                timeout=PYTHON_SECONDS,
                check=True,
            )
            file.seek(0)
            installed_: dict[str, Any] = json.loads(file.read())
    finally:
        output.unlink(missing_ok=True)
    names = ("python", "implementation", "executable", "packages", "torch_for")
    return {**{name: installed_[name] for name in names}, "torch": installed_["packages"].get("torch", "")}


def vigil() -> dict[str, Any]:
    """Describe Vigil: its version, the commit of a checkout, and a digest of the trainer's current sources."""
    try:
        version = str(tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["version"])
    except OSError:
        version = metadata.version("vigil")
    digest = hashlib.sha256()
    for path in sorted((SOURCE / "training").rglob("*.py")):
        digest.update(f"{path.relative_to(SOURCE)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return {"vigil": version, "vigil_commit": _head_commit(SOURCE / ".git"), "vigil_digest": digest.hexdigest()}


def code(plan: LaunchPlan) -> dict[str, Any]:
    """Describe the user's code: its repository and commit; for an upload its digest and the commit it was packed at."""
    if plan.code is None:
        return {}
    if plan.code.git:
        fetched = read_json(plan.job_dir / "code.json") or {}
        source = {"git": without_password(plan.code.git), "ref": plan.code.ref, "commit": fetched.get("commit", "")}
    else:
        upload = read_json(plan.run_dir / "portal" / "code.json") or {}
        source = {name: upload[name] for name in ("digest", "commit", "dirty") if name in upload}
    return source if plan.script is None else {**source, "variables": sorted(plan.script.env)[:MAX_VARIABLES]}


def settings(plan: LaunchPlan) -> dict[str, Any]:
    """Return the hash of everything that affects a run's numbers, as stored in its checkpoints."""
    if plan.script is not None:
        return {}
    return {"config_hash": run_file.load(plan.run_dir / "portal" / "run.toml").config.hash()}


def without_password(url: str) -> str:
    """Return the URL without what may be a secret.

    The user's name is part of an ssh address, but never needed for https.
    """
    parts = urlsplit(url)
    user, at, address = parts.netloc.rpartition("@")
    host = f"{user.partition(':')[0]}@{address}" if at and parts.scheme == "ssh" else address
    return f"{parts.scheme}://{host}{parts.path}"


def _head_commit(git: Path) -> str:
    """Return the commit of a checkout, read without git; "" if there is none."""
    with suppress(OSError):
        if git.is_file():  # in a worktree, a file that points to the repository
            git = git.parent / git.read_text().removeprefix("gitdir: ").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head if _COMMIT.fullmatch(head) else ""
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
        name = head.removeprefix("ref: ")
        for path in (git / name, shared / name):
            if path.is_file():
                return path.read_text().strip()
        lines = (shared / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")
    return ""


def _bounded(captured: dict[str, Any]) -> dict[str, Any]:
    """Return the record with as many packages as fit, and how many were left out."""
    packages = captured.get("packages", {})
    while len(json.dumps(captured)) > MAX_BYTES and captured.get("packages"):
        half = dict(list(captured["packages"].items())[: len(captured["packages"]) // 2])
        captured = {**captured, "packages": half, "packages_left_out": len(packages) - len(half)}
    return captured


def _limit_resources() -> None:
    """Use idle disk time only, and limit CPU time and file sizes."""
    with suppress(psutil.Error, OSError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
