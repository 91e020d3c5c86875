"""Test docker/install.sh: a missing prerequisite is one sentence with its remedy; what is up to date is left alone."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.stack import REPOSITORY

_there = importlib.util.spec_from_file_location("progress", REPOSITORY / "docker/progress.py")
assert _there is not None
assert _there.loader is not None
progress = importlib.util.module_from_spec(_there)
_there.loader.exec_module(progress)
_line = re.search(r"^torch=torch==(\S+)$", (REPOSITORY / "docker/install.sh").read_text(), re.MULTILINE)
assert _line is not None
VERSION = _line[1]
HAS_DRIVER = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


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


def test_without_any_python_the_remedy_is_named(tmp_path: Path) -> None:
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


def ready_but_for_torch(venv: Path, pip: str = "") -> None:
    """An environment that lacks torch alone; its Python is this one, with `pip` before it where that is given."""
    (venv / "bin").mkdir(parents=True)
    script(venv / "bin" / "python", f'{pip}\nexec {sys.executable} "$@"')
    for name, text in stamps(venv).items():
        if name != "torch":
            (venv / f".vigil-{name}").write_text(text)


def stamps(venv: Path) -> dict[str, str]:
    def digest(name: str) -> str:
        return hashlib.sha256((REPOSITORY / name).read_bytes()).hexdigest()

    return {
        "place": str(venv),
        "run": digest("requirements.lock"),
        "torch": f"torch=={VERSION}",
        "project": f"{REPOSITORY} {digest('pyproject.toml')}",
    }


def wheel(folder: Path, version: str) -> Path:
    """A torch of that version with nothing in it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"torch-{version}-py3-none-any.whl"
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


class Indexes:
    """Package indexes on 127.0.0.1, a folder each, with a record of what was requested."""

    def __init__(self, root: Path) -> None:
        self.root, self.asked = root, []
        outer = self

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *rest: object) -> None:
                super().__init__(*rest, directory=str(outer.root))  # type: ignore[arg-type]

            def log_message(self, form: str, *rest: object) -> None:
                outer.asked.append(self.path)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/{name}"

    def add(self, name: str, version: str) -> None:
        wheel(self.root / name / "torch", version)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[Indexes]:
    """The ordinary one with torch as it comes with CUDA, PyTorch's own of CPU builds, and an old one."""
    served = Indexes(tmp_path / "served")
    served.add("ordinary", VERSION)
    served.add("cpu", f"{VERSION}+cpu")
    served.add("old", "1.0+cpu")
    yield served
    served.close()


def clean(**environment: str) -> dict[str, str]:
    return {
        **dict.fromkeys((name for name in os.environ if name.startswith("PIP_")), ""),
        "no_proxy": "*",
        **environment,
    }


@pytest.mark.skipif(HAS_DRIVER, reason="this machine has an NVIDIA driver")
@pytest.mark.lengthy
def test_without_a_driver_pip_brings_the_cpu_build(tmp_path: Path, indexes: Indexes) -> None:
    ready_but_for_torch(tmp_path / "venv")
    environment = clean(
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL=indexes.url("ordinary"),
        PIP_CACHE_DIR=str(tmp_path / "cache"),
        PIP_TARGET=str(tmp_path / "site"),
        TORCH_CPU_INDEX=indexes.url("cpu"),
    )
    done = install(tmp_path / "venv", **environment)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "site").glob("*.dist-info")] == [f"torch-{VERSION}+cpu.dist-info"]
    assert "the CPU build, as there is no NVIDIA driver here" in done.stdout


def chosen(tmp_path: Path, *, at_hand: bool = False, **environment: str) -> tuple[list[str], str]:
    """Return what pip was to install and the output; pip is a stand-in that records its arguments."""
    path = tmp_path / "asked"
    pip = f"""case "$*" in
    *" --dry-run "*) exit {int(not at_hand)};;
    "-m pip"*" install "*) shift 5; echo "$*" >>{path}; exit;;
    "-m pip"*) exit;;
esac"""
    ready_but_for_torch(tmp_path / "venv", pip)
    done = install(tmp_path / "venv", **clean(**environment))
    assert done.returncode == 0, done.stderr
    return path.read_text().splitlines(), done.stdout


@pytest.mark.parametrize("by", ["nvidia-smi", "VIGIL_TORCH"])
def test_with_a_driver_or_by_setting_the_default_index_is_used(tmp_path: Path, indexes: Indexes, by: str) -> None:
    script(tmp_path / "nvidia-smi", "exit 0")
    more = {"VIGIL_TORCH": "cuda"} if by == "VIGIL_TORCH" else {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    request, text = chosen(tmp_path, TORCH_CPU_INDEX=indexes.url("cpu"), **more)
    assert request == [f"torch=={VERSION}"]
    assert "with CUDA" in text
    assert indexes.asked == []


@pytest.mark.parametrize("lacks", ["answers nothing", "has no such torch"])
def test_without_an_answer_of_the_cpu_index_the_default_index_is_used_and_named(
    tmp_path: Path, indexes: Indexes, lacks: str
) -> None:
    index = "http://127.0.0.1:1/cpu" if lacks == "answers nothing" else indexes.url("old")
    request, text = chosen(tmp_path, VIGIL_TORCH="cpu", TORCH_CPU_INDEX=index)
    assert request == [f"torch=={VERSION}"]
    assert f"({index}) does not answer, or lacks torch=={VERSION}: taking the ordinary index." in text


def test_a_wheel_at_hand_comes_before_any_index(tmp_path: Path, indexes: Indexes) -> None:
    request, text = chosen(tmp_path, at_hand=True, TORCH_CPU_INDEX=indexes.url("cpu"))
    assert request == [f"--no-index --no-deps torch=={VERSION}", f"torch=={VERSION}"]
    assert "from the wheel that pip has at hand" in text
    assert indexes.asked == []


def test_torch_pip_args_win(tmp_path: Path, indexes: Indexes) -> None:
    request, _ = chosen(
        tmp_path, at_hand=True, TORCH_PIP_ARGS="--index-url http://mine", TORCH_CPU_INDEX=indexes.url("cpu")
    )
    assert request == [f"--index-url http://mine torch=={VERSION}"]
    assert indexes.asked == []


FETCHING = """
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["TMPDIR"], "pip-unpack-x")
folder.mkdir()
print("  Downloading http://index/torch-2.0%2Bcpu-cp311-linux.whl (200.0 MB)", flush=True)
with open(folder / "torch-2.0+cpu-cp311-linux.whl", "wb") as file:
    file.truncate(50_000_000)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def fetching(tmp_path: Path) -> list[str]:
    (tmp_path / "log").write_text("Downloading what-was-before-1.0-py3.whl (9.0 GB)\n")
    reports = [sys.executable, str(REPOSITORY / "docker/progress.py"), str(tmp_path / "log")]
    return [*reports, sys.executable, "-c", FETCHING, str(tmp_path / "enough")]


def test_long_downloads_report_their_progress_in_a_log(tmp_path: Path) -> None:
    environment = {**os.environ, "VIGIL_PROGRESS_EVERY": "0"}
    with subprocess.Popen(fetching(tmp_path), env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "  torch-2.0+cpu: 50 MB of 200 MB\n"
        (tmp_path / "enough").touch()
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_on_a_terminal_one_line_is_rewritten_and_cleared(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    process = subprocess.Popen(fetching(tmp_path), stdout=theirs)
    os.close(theirs)
    output = b""
    while b"50 MB of 200 MB" not in output:
        output += os.read(ours, 1000)
    (tmp_path / "enough").touch()
    assert process.wait(30) == 0
    output += os.read(ours, 1000)
    os.close(ours)
    assert b"\n" not in output
    assert output.endswith(b"\r\x1b[K")


def test_speed_and_seconds_left_are_of_the_last_seconds(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "pip-unpack-x"
    log.touch()
    folder.mkdir()
    downloads = progress.Downloads(log, tmp_path)
    assert downloads.line(0.0) == ""
    log.write_text("Downloading a-1.0-py3.whl (2.0 GB)\n")
    for second, size in ((1.0, 0), (5.0, 40_000_000), (9.0, 80_000_000)):
        with open(folder / "a-1.0-py3.whl", "wb") as file:
            file.truncate(size)
        report = downloads.line(second)
    assert report == "a-1.0: 80 MB of 2.0 GB, 8.9 MB/s, about 4 min left"
    log.write_text(log.read_text() + "Downloading b-1.0-py3.whl (20.1 kB)\n")
    assert downloads.line(9.5) == "80 MB downloaded, now b-1.0"
    log.write_text(log.read_text() + "Installing collected packages: a\n")
    assert downloads.line(10.0) == "80 MB downloaded, unpacking"


def test_nothing_is_done_when_everything_is_there(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    script(venv / "bin" / "python", 'test "$1" = -c')  # fails at anything but the check whether it works
    for name, text in stamps(venv).items():
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
    assert not {name for name in names if name in {"torch", "triton"} or name.startswith("nvidia")} - {"nvidia-ml-py"}
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
