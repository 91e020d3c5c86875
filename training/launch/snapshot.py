"""Provide the snapshot of the user's code that a job runs (a program or federated clients) in job/code.

The portal has put it there, or git fetches it here, inside the allocation and as the job's user. Every attempt of a
job runs the same snapshot.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from training.attempt.files import read_json, write_json
from training.launch.plan import BadPlan, CodePlan, LaunchPlan
from training.launch.ranks import child_setup, inherited
from training.launch.stop import STOP_SIGNALS

FETCH_SECONDS = 600.0
FETCH_BYTES = 1024**3
WAIT_SECONDS = 900.0  # how long other nodes wait for the first node's fetch
SCHEMES = ("https", "ssh")
COMMIT = re.compile(r"[0-9a-f]{4,64}")


def ensure_code(plan: LaunchPlan, *, stopping: Callable[[], bool] = lambda: False) -> None:
    """Make sure that the job's code is in place, if it has any. Raises BadPlan."""
    if plan.code is None:
        return
    folder = plan.code_dir
    if plan.code.git and not folder.is_dir():
        _fetch_once(plan, plan.code, folder, stopping)
    if not folder.is_dir():
        raise BadPlan(f"{folder} is missing: the code of this job was never put there; submit it again")


def _fetch_once(plan: LaunchPlan, code: CodePlan, folder: Path, stopping: Callable[[], bool]) -> None:
    """Fetch on the first node; on the others wait for the folder, or for the first node's failure."""
    failed = plan.job_dir / "code-failed.json"
    if plan.is_first:
        failed.unlink(missing_ok=True)
        try:
            fetch(code, folder, stopping=stopping)
        except BadPlan as error:
            write_json(failed, {"error": str(error), "restart_count": plan.restart_count, "id": plan.scheduler_id})
            raise
        return
    deadline = time.monotonic() + WAIT_SECONDS
    while not folder.is_dir():
        failure = read_json(failed)
        if failure and failure.get("id") == plan.scheduler_id and failure.get("restart_count") == plan.restart_count:
            raise BadPlan(str(failure["error"]))
        if stopping() or time.monotonic() > deadline:
            raise BadPlan("the first node did not fetch the code")
        time.sleep(0.2)


def fetch(
    code: CodePlan,
    target: Path,
    *,
    seconds: float = FETCH_SECONDS,
    limit: int = FETCH_BYTES,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Fetch one commit of a repository into `target` as plain files; the folder appears complete or not at all.

    No hooks, no submodules, no transport but https and ssh (file:// where VIGIL_GIT_FILE allows it, for tests), no
    prompts; limited in time and size. Raises BadPlan.
    """
    url, ref = code.git, code.ref
    schemes = (*SCHEMES, "file") if os.environ.get("VIGIL_GIT_FILE") == "1" else SCHEMES
    if urlsplit(url).scheme not in schemes:
        raise BadPlan(f"{code.table}.git = {url!r}: only https:// and ssh:// addresses are fetched")
    if ref.startswith("-"):
        raise BadPlan(f"{code.table}.ref = {ref!r} is not a branch, tag or commit")
    staging = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    staging.mkdir()
    git = _Git(staging, schemes, deadline=time.monotonic() + seconds, limit=limit, stopping=stopping)
    try:
        git.run("init", "--quiet", "--template=")
        try:
            git.run("fetch", "--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules", url, ref or "HEAD")
        except _GitFailed:
            if not COMMIT.fullmatch(ref):
                raise
            # The server does not serve single commits: fetch everything, then take the commit from that.
            git.run("fetch", "--quiet", "--no-recurse-submodules", url, "+refs/*:refs/fetched/*")
            git.run("update-ref", "FETCH_HEAD", ref)
        git.run("-c", "advice.detachedHead=false", "checkout", "--quiet", "--force", "FETCH_HEAD")
        commit = git.run("rev-parse", "HEAD").strip()
        shutil.rmtree(staging / ".git")
        write_json(target.with_name("code.json"), {"git": url, "ref": ref, "commit": commit}, durable=True)
        os.rename(staging, target)
    except _GitFailed as error:
        raise BadPlan(f"{code.table}.git: {url} at {ref or 'HEAD'} cannot be fetched: {error}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class _GitFailed(Exception):
    """git failed; the message is git's."""


class _Git:
    """Runs git in one folder, with every feature disabled that could run foreign code or prompt."""

    def __init__(
        self, folder: Path, schemes: tuple[str, ...], *, deadline: float, limit: int, stopping: Callable[[], bool]
    ) -> None:
        self._folder, self._deadline, self._limit, self._stopping = folder, deadline, limit, stopping
        self._options = [
            "-c",
            "core.hooksPath=/dev/null",
            "-c",
            "protocol.allow=never",
            "-c",
            "submodule.recurse=false",
        ]
        for scheme in schemes:
            self._options += ["-c", f"protocol.{scheme}.allow=always"]
        self._environment = {
            **inherited(),
            **{name: os.environ[name] for name in ("SSH_AUTH_SOCK",) if name in os.environ},
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "/bin/false",
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_LFS_SKIP_SMUDGE": "1",
        }

    def run(self, *arguments: str) -> str:
        errors = self._folder.with_name(f"{self._folder.name}.err")
        try:
            with open(errors, "w+b") as file:
                return self._run(list(arguments), file.fileno(), errors)
        except FileNotFoundError:
            raise _GitFailed("git is not installed on this node") from None
        finally:
            errors.unlink(missing_ok=True)

    def _run(self, arguments: list[str], errors: int, error_file: Path) -> str:
        process = subprocess.Popen(
            ["git", *self._options, *arguments],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            process_group=0,
            preexec_fn=child_setup(STOP_SIGNALS),
        )
        while True:
            try:
                output, _ = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                if problem := self._problem():
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
                    raise _GitFailed(problem) from None
        if process.returncode:
            lines = error_file.read_text(errors="replace").strip().splitlines()
            raise _GitFailed(lines[-1][:500] if lines else f"git ended with {process.returncode}")
        if problem := self._problem():
            raise _GitFailed(problem)
        return output.decode(errors="replace")

    def _problem(self) -> str:
        if self._stopping():
            return "asked to stop meanwhile"
        if time.monotonic() > self._deadline:
            return "it took too long"
        if _bytes_in(self._folder) > self._limit:
            return f"it is larger than {self._limit / 1024**2:.0f} MiB"
        return ""


def _bytes_in(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
