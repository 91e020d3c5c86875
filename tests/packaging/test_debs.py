"""Test the Debian packages, installed below a folder and removed, and the systemd units of the site and the agent."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNITS = [*ROOT.glob("packaging/systemd/*.service"), *ROOT.glob("docs/*/*.service")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("dpkg-deb") or os.geteuid() != 0, reason="needs root on Debian"),
]


def run(*words: str | Path, **variables: str) -> str:
    done = subprocess.run(
        [*map(str, words)], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder that dpkg treats as the root of a system without packages."""
    root = tmp_path / "root"
    (root / "var/lib/dpkg/info").mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    (root / "etc").mkdir()
    for name in ("passwd", "group"):
        (root / "etc" / name).touch()
    return root


def dpkg(root: Path, *words: str | Path) -> str:
    return run("dpkg", f"--root={root}", "--force-script-chrootless", "--force-depends", *words)


def build(kind: str, folder: Path) -> Path:
    run("sh", ROOT / "packaging/deb/build.sh", kind, folder, PYTHON=sys.executable)
    (package,) = folder.glob("*.deb")
    return package


def test_the_agent_is_installed_and_removed(root: Path, tmp_path: Path) -> None:
    package = build("agent", tmp_path / "out")
    dpkg(root, "--install", package)
    agent = root / "usr/lib/vigil-agent/vigil-agent.pyz"
    assert "docs/how-to/agent.md" in run(sys.executable, agent, "--help")
    assert (root / "etc/vigil-agent/environment").stat().st_mode & 0o777 == 0o600
    unit = (root / "lib/systemd/system/vigil-agent.service").read_text()
    assert f"ExecStart=/usr/bin/python3 /{agent.relative_to(root)}" in unit
    dpkg(root, "--remove", "vigil-agent")
    assert not agent.exists()
    assert (root / "etc/vigil-agent/environment").exists(), "settings stay until a purge"
    dpkg(root, "--purge", "vigil-agent")
    assert not (root / "etc/vigil-agent").exists()


def test_the_agent_is_built_by_a_python_without_packages(tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "bare")
    python = tmp_path / "bare/bin/python"
    run("sh", ROOT / "packaging/deb/build.sh", "agent", tmp_path / "out", PYTHON=str(python))
    assert list((tmp_path / "out").glob("vigil-agent_*_all.deb"))


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_site_is_installed_and_removed(root: Path, tmp_path: Path) -> None:
    package = build("site", tmp_path / "out")
    dpkg(root, "--install", package)
    assert "vigil:x:" in (root / "etc/passwd").read_text(), "its Unix user"
    python = root / "opt/vigil/bin/python"
    version = run(python, "-P", "-m", "vigil_cli.main", "--version", VIGIL_HOME=str(tmp_path / "home"))
    assert version.startswith("vigil 0.")
    run(python, "-P", "-m", "console.manage", "check", VIGIL_HOME=str(tmp_path / "home"))
    scripts = [path for path in (root / "opt/vigil/bin").iterdir() if path.is_file() and not path.is_symlink()]
    assert not [path for path in scripts if str(tmp_path).encode() in path.read_bytes()], "no path of the build"
    data = root / "var/lib/vigil/vigil.sqlite3"
    data.parent.mkdir(parents=True)
    data.touch()
    dpkg(root, "--purge", "vigil")
    assert not (root / "opt/vigil/bin").exists()
    assert data.exists(), "a lab's history is nobody's to purge"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_units_are_valid(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    assert "\nRestart=" in text
    assert "\n[Install]\n" in text
    # systemd wants the programs to be there: something that is, under the same arguments.
    programs = {line.partition("=")[2].split()[0] for line in text.splitlines() if line.startswith("ExecStart")}
    for program in programs:
        text = text.replace(program, "/bin/true")
    copy = tmp_path / unit.name.replace("@.", "@follow.")
    copy.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    texts = [line for line in done.stderr.splitlines() if str(tmp_path) in line or unit.stem in line]
    assert done.returncode == 0, done.stderr
    assert not texts, done.stderr
