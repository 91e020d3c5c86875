"""What an attempt ran with, kept beside it.

    python -P -m training.provenance.capture RUN_DIR ATTEMPT_DIR PYTHON PYTHONPATH

Started by the launcher on the leading node once the ranks run, with the interpreter that they use. Facts only, and
nothing secret: of the variables that the spec sets their names, of a repository's address no password. A part that
cannot be told is left out; the others stand.
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
MOST_BYTES = 256 * 1024
PYTHON_SECONDS = 20.0
CPU_SECONDS = 30
FILE_BYTES = 1 << 20  # of anything that this process, or the interpreter that it asks, writes
MOST_VARIABLES = 200
SOURCE = Path(__file__).resolve().parents[2]
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def main(arguments: list[str]) -> int:
    run_dir, attempt_dir, python, path = Path(arguments[0]), Path(arguments[1]), arguments[2], arguments[3]
    _be_modest()
    plan = read_plan(run_dir)
    told = capture(plan, python=python, path=path, scratch=attempt_dir)
    write_json(attempt_dir / FILE, told)
    if gpus := machine.gpus(os.environ.get("CUDA_VISIBLE_DEVICES")):  # last: a driver may not answer
        write_json(attempt_dir / FILE, _bounded({**told, **gpus}))
    return 0


def capture(plan: LaunchPlan, *, python: str, path: str, scratch: Path) -> dict[str, Any]:
    """All but the GPUs, in at most MOST_BYTES of JSON."""
    parts: list[Callable[[], dict[str, Any]]] = [
        partial(interpreter, plan, python, path, scratch),
        machine.system,
        machine.processors,
        vigil,
        partial(code, plan),
        partial(settings, plan),
    ]
    told: dict[str, Any] = {"version": VERSION, "captured_at": time.time(), "node": plan.node}
    for part in parts:
        try:
            told |= part()
        except Exception as error:  # one part that cannot be told leaves the others
            print(f"training.provenance.capture: {error!r}", file=sys.stderr)
    return _bounded(told)


def interpreter(plan: LaunchPlan, python: str, path: str, scratch: Path) -> dict[str, Any]:
    """The ranks' Python and its packages, by its own word: isolated, without `site`, bounded in time and size."""
    spec = plan.script.env if plan.script else {}
    known = {name: spec[name] for name in ("PYTHONUSERBASE", "PYTHONNOUSERSITE", "LD_LIBRARY_PATH") if name in spec}
    folders = [folder for folder in path.split(os.pathsep) if folder]
    answer = scratch / f".installed.{os.getpid()}"
    try:
        with open(answer, "w+b") as file:
            subprocess.run(
                [python, "-I", "-S", installed.__file__, *folders],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={**inherited(), **known},
                timeout=PYTHON_SECONDS,
                check=True,
            )
            file.seek(0)
            found: dict[str, Any] = json.loads(file.read())
    finally:
        answer.unlink(missing_ok=True)
    names = ("python", "implementation", "executable", "packages", "torch_for")
    return {**{name: found[name] for name in names}, "torch": found["packages"].get("torch", "")}


def vigil() -> dict[str, Any]:
    """Which Vigil: its version, the commit of a checkout, and a digest of the trainer's sources as they are now."""
    try:
        version = str(tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["version"])
    except OSError:
        version = metadata.version("vigil")
    digest = hashlib.sha256()
    for path in sorted((SOURCE / "training").rglob("*.py")):
        digest.update(f"{path.relative_to(SOURCE)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return {"vigil": version, "vigil_commit": _head(SOURCE / ".git"), "vigil_digest": digest.hexdigest()}


def code(plan: LaunchPlan) -> dict[str, Any]:
    """Somebody's own: where from and which commit; of an upload its digest, and the commit that it was packed at."""
    if plan.code is None:
        return {}
    if plan.code.git:
        fetched = read_json(plan.job_dir / "code.json") or {}
        told = {"git": without_password(plan.code.git), "ref": plan.code.ref, "commit": fetched.get("commit", "")}
    else:
        sent = read_json(plan.run_dir / "portal" / "code.json") or {}
        told = {name: sent[name] for name in ("digest", "commit", "dirty") if name in sent}
    return told if plan.script is None else {**told, "variables": sorted(plan.script.env)[:MOST_VARIABLES]}


def settings(plan: LaunchPlan) -> dict[str, Any]:
    """The hash of all that decides the numbers of a run, as its checkpoints remember it."""
    if plan.script is not None:
        return {}
    return {"config_hash": run_file.load(plan.run_dir / "portal" / "run.toml").config.hash()}


def without_password(url: str) -> str:
    """The address without what may be a secret: over ssh the user's name is part of it, over https it never is."""
    parts = urlsplit(url)
    user, at, place = parts.netloc.rpartition("@")
    kept = f"{user.partition(':')[0]}@{place}" if at and parts.scheme == "ssh" else place
    return f"{parts.scheme}://{kept}{parts.path}"


def _head(git: Path) -> str:
    """The commit that a checkout is at, read without git; "" where there is none."""
    with suppress(OSError):
        if git.is_file():  # a worktree's points to its place in the repository
            git = git.parent / git.read_text().removeprefix("gitdir: ").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head if _COMMIT.fullmatch(head) else ""
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
        name = head.removeprefix("ref: ")
        for place in (git / name, shared / name):
            if place.is_file():
                return place.read_text().strip()
        lines = (shared / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")
    return ""


def _bounded(told: dict[str, Any]) -> dict[str, Any]:
    """What was told, with as many packages as there is room for, and how many were left out."""
    packages = told.get("packages", {})
    while len(json.dumps(told)) > MOST_BYTES and told.get("packages"):
        half = dict(list(told["packages"].items())[: len(told["packages"]) // 2])
        told = {**told, "packages": half, "packages_left_out": len(packages) - len(half)}
    return told


def _be_modest() -> None:
    """No more than idle disk time, and an end to every size and computation."""
    with suppress(psutil.Error, OSError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
