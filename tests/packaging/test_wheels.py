"""Test the two wheels, built from this tree and run without a checkout: the site, and the command line alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jobs.spec import JobSpec, write_toml
from tests.waiting import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = r"""
import sys, vigil_report

vigil_report.log(1, loss=0.5)
print(*sys.path, sep="\n")
"""
LOG = """Traceback (most recent call last):
  File "train.py", line 7, in <module>
    loss.backward()
RuntimeError: CUDA error: an illegal memory access was encountered
"""
WITHOUT_SITE = """
import sys

sys.path[:0] = sys.argv[1:]
from vigil_cli.portal import CliError
from vigil_cli.site import needs_site

try:
    needs_site("up")
except CliError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files in git: a build writes next to its sources."""
    copy = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", ".", ":!tests"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    packed = subprocess.run(
        ["tar", "--null", "-T", "-", "-cf", "-"], cwd=ROOT, input=names, capture_output=True, check=True
    )
    subprocess.run(["tar", "-xf", "-", "-C", str(copy)], input=packed.stdout, check=True)
    return copy


def build(source: Path, project: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(source / project)], cwd=source, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


class Installed:
    """A wheel unpacked into a separate folder, with this environment's other packages available."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.packages, self.home, self.folder = folder / "packages", folder / "home", folder
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-compile",
            "--target",
            str(self.packages),
        ]
        subprocess.run([*install, str(wheel)], check=True)
        stored = {name: value for name, value in os.environ.items() if not name.startswith("VIGIL_")}
        self.environment = {**stored, "PYTHONPATH": str(self.packages), "HOME": str(folder)}

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*words), cwd=self.folder, env={**self.environment, **variables}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-P", "-m", "vigil_cli.main", *words]


@pytest.fixture(scope="module")
def site(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("site")
    return Installed(build(source, ".", folder), folder)


@pytest.fixture(scope="module")
def client(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("client")
    return Installed(build(source, "packaging/client", folder), folder)


@pytest.fixture(scope="module")
def running(site: Installed) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (site.folder / "up.log").open("w") as log:
        up = subprocess.Popen(
            site.command("up"), cwd=site.folder, env={**site.environment, "VIGIL_PORT": str(port)}, stdout=log,
            stderr=log,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert up.poll() is None, (site.folder / "up.log").read_text()
        try:
            return httpx.get(f"{url}/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    try:
        until(is_ready, "the site")
        yield url
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(30)


def test_the_site_needs_no_checkout(site: Installed, running: str) -> None:
    page = httpx.get(f"{running}/accounts/login/")
    assert page.status_code == 200, "a template"
    style = next(word.split('"')[1] for word in page.text.split("href=")[1:] if ".css" in word.split('"')[1])
    assert httpx.get(f"{running}{style}").status_code == 200, "a static file"
    home = site.folder / ".local" / "share" / "vigil"
    assert (home / "vigil.sqlite3").is_file(), "data are in the user's own folder"
    assert site.run("tokens", "--json").returncode == 0, "the command line finds the portal"


def test_its_jobs_run_without_its_packages(site: Installed, running: str) -> None:
    code = site.folder / "code"
    code.mkdir(exist_ok=True)
    (code / "train.py").write_text(PROGRAM)
    spec = {"name": "a", "kind": "script", "script": {"directory": "code"}, "resources": {"ranks_per_node": 1}}
    text = write_toml(JobSpec.parse(spec))
    (site.folder / "job.toml").write_text(text)
    job = json.loads(site.run("submit", "job.toml", "--watch", "--json").stdout.splitlines()[-1])
    assert job["state"] == "completed"
    printed = site.run("logs", str(job["id"])).stdout
    assert str(site.packages) not in printed.splitlines(), "packages of the site"


def test_the_client_queries_a_portal(client: Installed, running: str, site: Installed) -> None:
    config = site.folder / ".local" / "share" / "vigil" / "cli.toml"
    assert client.run("jobs", "--json", VIGIL_HOME=str(config.parent)).returncode == 0


def test_the_client_works_without_the_site(client: Installed, tmp_path: Path) -> None:
    assert not (client.packages / "console").exists()
    assert not (client.packages / "jobs").exists()
    (client.folder / "log.txt").write_text(LOG)
    assert "CUDA error" in client.run("diagnose", "log.txt", "--json").stdout
    # This environment has the checkout, too; without it the command names where it can run.
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    command = [sys.executable, "-I", "-S", "-c", WITHOUT_SITE, str(client.packages), *libraries]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "install the vigil wheel" in refused.stdout


@pytest.mark.parametrize("wheel", ["site", "client"])
def test_a_wheel_has_every_data_file_of_its_packages(source: Path, wheel: str, request: pytest.FixtureRequest) -> None:
    installed: Installed = request.getfixturevalue(wheel)
    folders = [path.parent.relative_to(installed.packages) for path in installed.packages.rglob("__init__.py")]
    packages = [folder for folder in folders if (source / folder / "__init__.py").is_file()]
    files = [path for folder in packages for path in data_files(source / folder)]
    assert len(files) > 20
    assert [str(path) for path in files if not (installed.packages / path.relative_to(source)).is_file()] == []


def data_files(package: Path) -> list[Path]:
    """Return the data files of a package and of its folders that are not packages themselves."""
    found = []
    for path in package.iterdir():
        if path.is_dir() and not (path / "__init__.py").is_file():
            found += data_files(path)
        elif path.suffix in {".toml", ".md", ".gz"}:
            found.append(path)
    return found
