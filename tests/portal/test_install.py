"""docker/install.sh: a missing prerequisite is one sentence with its remedy; what is up to date is left alone."""

import hashlib
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.stack import REPOSITORY


def install(venv: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VIGIL_INSTALL_LOG": str(venv.parent / "install.log"), **environment}
    command = ["/bin/sh", str(REPOSITORY / "docker/install.sh"), str(venv), "run"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_python_that_is_too_old_is_named(tmp_path: Path) -> None:
    old = script(tmp_path / "python3.9", "exit 1")
    refused = install(tmp_path / "venv", PYTHON=str(old))
    assert refused.returncode == 1
    assert refused.stderr == f"Vigil cannot be installed: PYTHON={old} is not Python 3.11 or newer.\n"


def test_no_python_at_all_says_what_to_install(tmp_path: Path) -> None:
    for name in ("dirname", "mkdir", "cat", "flock", "sha256sum", "cut"):
        (tmp_path / name).symlink_to(Path("/usr/bin") / name)
    refused = install(tmp_path / "venv", PATH=str(tmp_path), PYTHON="")
    assert refused.returncode == 1
    assert "apt-get install python3 python3-venv" in refused.stderr


def test_missing_venv_module_names_the_package(tmp_path: Path) -> None:
    # Debian's python3 without python3-venv: it runs, but has no ensurepip.
    bare = script(
        tmp_path / "python3.11",
        'case "$2" in *version_info\\ *\\<*) exit 0;; *ensurepip*) exit 1;; *print*) echo python3.11-venv;; esac',
    )
    refused = install(tmp_path / "venv", PYTHON=str(bare))
    assert refused.returncode == 1
    assert "apt-get install python3.11-venv" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_failing_step_shows_the_end_of_its_log(tmp_path: Path) -> None:
    broken = script(tmp_path / "python3", 'case "$*" in *"-m venv"*) echo no space left on device; exit 1;; esac')
    refused = install(tmp_path / "venv", PYTHON=str(broken))
    assert refused.returncode == 1
    assert "no space left on device" in refused.stderr
    assert str(tmp_path / "install.log") in refused.stderr


def test_nothing_is_done_when_everything_is_there(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    script(venv / "bin" / "python", 'test "$1" = -c')  # anything but a look whether it works fails

    def digest(name: str) -> str:
        return hashlib.sha256((REPOSITORY / name).read_bytes()).hexdigest()

    torch = re.search(r"^torch=(\S+)$", (REPOSITORY / "docker/install.sh").read_text(), re.MULTILINE)
    assert torch
    stamps = {
        "place": str(venv),
        "run": digest("requirements.lock"),
        "torch": torch[1],
        "project": f"{REPOSITORY} {digest('pyproject.toml')}",
    }
    for name, text in stamps.items():
        (venv / f".vigil-{name}").write_text(text)
    done = install(venv)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (venv / ".vigil-run").write_text("another lock")
    assert install(venv).returncode == 1, "a changed lock is installed"


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock", "requirements-extras.lock"])
def test_locks_have_hashes_and_no_torch(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    names = re.findall(r"^([a-z0-9._-]+)==", text, re.MULTILINE)
    assert len(names) > 30
    assert not {name for name in names if name in {"torch", "triton"} or name.startswith("nvidia")}
    assert text.count("--hash=sha256:") >= len(names)


def test_the_locks_agree() -> None:
    pins = [
        dict(re.findall(r"^([a-z0-9._-]+)(?:\[[a-z,]+\])?==(\S+)", (REPOSITORY / name).read_text(), re.MULTILINE))
        for name in ("requirements.lock", "requirements-dev.lock", "requirements-extras.lock")
    ]
    run, dev, extras = pins
    assert {name: dev.get(name) for name in run} == run
    assert {name: extras[name] for name in extras if name in dev} == {name: dev[name] for name in extras if name in dev}


def test_the_extra_names_what_its_lock_was_made_from() -> None:
    extra = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]["trainer"]
    lines = (REPOSITORY / "requirements-extras.in").read_text().splitlines()
    assert extra == [line for line in lines if not line.startswith("#")]
