"""Somebody's own program as ranks: its environment, its code, its reports, checkpoints and stops."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vigil_report
from tests.training.launching import Run, until
from training import manifest, script
from training.launch.attempt import Attempt
from training.launch.plan import BadPlan, Plan, Script
from training.spool import read_spool


@pytest.fixture(autouse=True)
def _terminable() -> Iterator[None]:
    """vigil_report takes TERM over from a program that does not handle it; here that is the tests' own process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run")
    yield run
    run.end()


ENVIRONMENT = """
import json, os, sys
print(json.dumps({"environment": dict(os.environ), "arguments": sys.argv[1:], "path": sys.path, "place": os.getcwd()}))
"""


def _told(run: Run, rank: int = 0) -> dict[str, object]:
    told: dict[str, object] = json.loads((run.attempt() / "logs" / f"0.{rank}.log").read_text())
    return told


@pytest.mark.slow
def test_a_rank_sees_torchruns_variables_and_nothing_it_should_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ("SECRET_KEY", "DATABASE_URL", "VIGIL_HOME", "SLURM_JWT", "HF_TOKEN")
    for name in secret:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    described = 'args = ["--a", "b c"]\n[script.env]\nMINE = "yes"\n'
    assert run.script(ENVIRONMENT, ranks=2, script=described).wait(30) == 0
    for rank in range(2):
        told = _told(run, rank)
        environment = told["environment"]
        assert isinstance(environment, dict)
        expected = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1", "MINE": "yes",
            "NCCL_DEBUG": "INFO", "VIGIL_RUN_DIR": str(run.path), "VIGIL_RESUME": "", "VIGIL_GENERATION": "1",
        }  # fmt: skip
        assert {name: environment.get(name) for name in expected} == expected
        assert 1024 < int(environment["MASTER_PORT"]) < 65536
        assert not set(secret) & set(environment)
        assert told["arguments"] == ["--a", "b c"]
        assert told["place"] == str(run.path / "job" / "code")
        assert environment["PYTHONPATH"] == str(run.attempt() / "lib")
        assert os.listdir(run.attempt() / "lib") == ["vigil_report.py"]


@pytest.mark.slow
def test_a_script_that_reports_nothing_still_has_logs_and_resource_use(run: Run) -> None:
    source = "import time\nprint('hello')\nx = bytearray(80 * 2**20)\ntime.sleep(1.5)\n"
    assert run.script(source).wait(30) == 0
    assert (run.attempt() / "logs" / "0.0.log").read_text() == "hello\n"
    (path,) = (run.attempt() / "spool").glob("*.jsonl")
    values = [value for batch in read_spool(path)[1] for _, value in batch.series.get("memory_gib", [])]
    assert max(values) > 0.05


REPORTING = """
import json, os, sys, time
import vigil_report
path = vigil_report.resume_path()
first = json.loads(open(path).read())["step"] if path else 0
for step in range(first + 1, {steps} + 1):
    time.sleep(0.01)
    vigil_report.log(step, loss=1 / step, accuracy=float("nan") if step == 3 else 0.5)
    vigil_report.progress(step, {steps})
    stopping = vigil_report.stopping()
    if step % 10 == 0 or stopping:
        with open("model.json", "w") as file:
            json.dump({{"step": step}}, file)
        vigil_report.checkpoint("model.json", step, consumed_samples=step * 4)
    {accident}
    if stopping:
        sys.exit(0)
"""


@pytest.mark.slow
def test_what_a_script_reports_arrives(run: Run) -> None:
    assert run.script(REPORTING.format(steps=25, accident="")).wait(30) == 0
    assert run.losses()[0] == {step: 1 / step for step in range(1, 26)}
    assert run.events("progress")[-1]["steps"] == 25
    names = [event["name"] for event in run.events("checkpoint.committed")]
    assert names == ["step-10", "step-20"]
    found = manifest.verify(run.path / "job" / "checkpoints" / "step-20")
    assert (found.step, found.generation, found.parent, found.ancestors) == (20, 1, (10, 1), ((10, 1),))
    assert found.consumed_samples == 80


@pytest.mark.slow
def test_a_script_resumes_from_its_own_checkpoint(run: Run) -> None:
    accident = "os.environ['VIGIL_INCARNATION'] == '0' and step == 17 and os.kill(os.getpid(), 9)"
    assert run.script(REPORTING.format(steps=30, accident=accident)).wait(30) == 0
    assert sorted(run.losses()[1]) == list(range(11, 31))
    last = run.events("checkpoint.committed")[-1]
    assert (last["step"], last["parent_step"], last["parent_generation"]) == (30, 20, 2)


@pytest.mark.slow
def test_a_script_that_asks_saves_and_stops(run: Run) -> None:
    launcher = run.script(REPORTING.format(steps=10**6, accident=""))
    until(lambda: run.attempt().exists() and run.losses().get(0))
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 75
    step = json.loads((run.attempt() / "stopped.json").read_text())["step"]
    assert [event["step"] for event in run.events("stop.saved")] == [step]
    again = run.script(REPORTING.format(steps=step + 5, accident=""))
    run.launchers[-1].wait(30)
    assert again.returncode == 75  # the very same submission: its verdict stands
    third = run.launch(restart=1)
    assert third.wait(30) == 0
    assert sorted(run.losses(2)[0]) == list(range(step + 1, step + 6))
    run.assert_nothing_left()


HANDLER = """
import signal, sys, time
def leave(number, frame):
    print("leaving", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.mark.slow
def test_a_scripts_own_handler_gets_term(run: Run) -> None:
    launcher = run.script(HANDLER)
    until(lambda: run.attempt().exists() and "ready" in _log(run))
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 0
    assert "leaving" in _log(run)


@pytest.mark.slow
def test_a_script_that_knows_no_stop_ends_by_term(run: Run) -> None:
    launcher = run.script("import time\nprint('ready', flush=True)\ntime.sleep(3600)\n")
    until(lambda: run.attempt().exists() and "ready" in _log(run))
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 143
    assert run.result()["cause"] == "stopped"
    run.assert_nothing_left()


def _log(run: Run) -> str:
    path = run.attempt() / "logs" / "0.0.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.slow
def test_a_failing_script_gives_its_code_and_last_word(run: Run) -> None:
    assert run.script("import sys\nprint('no data')\nsys.exit(7)\n").wait(30) == 7
    first = run.result()["first_failure"]
    assert (first["kind"], first["exit_code"], first["error"]) == ("exception", 7, "no data")


@pytest.mark.slow
def test_a_port_that_was_taken_is_tried_again(run: Run) -> None:
    source = """
import os
if os.environ["VIGIL_INCARNATION"] == "0":
    raise RuntimeError("The server socket has failed to listen on any local network address. port: 1, EADDRINUSE")
"""
    assert run.script(source, launch="in_place = 0\n").wait(30) == 0


@pytest.mark.slow
def test_a_wrong_entry_is_said_where_a_person_looks(run: Run) -> None:
    assert run.script("", script='entry = "run.py"\n').wait(30) == 2
    assert run.result()["error"] == "script.entry = 'run.py' is not in the directory (it has train.py)"
    assert run.events("run.failed")[0]["error"] == run.result()["error"]


@pytest.mark.slow
def test_two_ranks_of_a_script_meet_by_torchs_own_means(run: Run) -> None:
    source = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(x)
print(x.item())
dist.destroy_process_group()
"""
    assert run.script(source, ranks=2).wait(120) == 0
    assert [(run.attempt() / "logs" / f"0.{rank}.log").read_text().splitlines()[-1] for rank in (0, 1)] == [
        "3.0",
        "3.0",
    ]


@pytest.mark.slow
def test_the_example_runs(run: Run) -> None:
    shutil.copytree(Path(__file__).parents[2] / "examples" / "script", run.path / "job" / "code")
    source = (run.path / "job" / "code" / "train.py").read_text()
    assert run.script(source, ranks=2, script='args = ["--steps", "60"]\n').wait(120) == 0
    assert sorted(run.losses(rank=1)[0]) == list(range(1, 61))


# What is to be run.


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "job" / "code").mkdir(parents=True)
    (tmp_path / "job" / "code" / "train.py").write_text("")
    (tmp_path / "job" / "attempt-1").mkdir()
    return _plan(tmp_path)


def _plan(run_dir: Path, **told: str) -> Plan:
    about = Script(**{"entry": "train.py", **told})  # type: ignore[arg-type]
    return Plan(run_dir=run_dir, scheduler_id="1", restart_count=0, node="n", script=about)


def _prepare(plan: Plan) -> tuple[str, ...]:
    return script.prepare(plan, Attempt(plan.job_dir / "attempt-1", 1)).arguments


def test_the_entry_stays_inside_the_code(plan: Plan) -> None:
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
    shutil.rmtree(code)
    with pytest.raises(BadPlan, match="never put there"):
        _prepare(plan)


def test_the_interpreter_is_a_path_or_an_environment(plan: Plan, tmp_path: Path) -> None:
    assert _prepare(plan)[0] == sys.executable
    assert _prepare(_plan(plan.run_dir, python=sys.executable))[0] == sys.executable
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    assert _prepare(_plan(plan.run_dir, python=str(tmp_path / "venv")))[0] == str(tmp_path / "venv" / "bin" / "python")
    with pytest.raises(BadPlan, match="no interpreter on this node"):
        _prepare(_plan(plan.run_dir, python="/nowhere/python"))


# Git.


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits, a tag on the first, a hook, a submodule entry."""
    monkeypatch.setenv("VIGIL_GIT_FILE", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "repository"
    folder.mkdir()
    _git(folder, "init", "-q", "-b", "main")
    (folder / "train.py").write_text("print(1)\n")
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "one")
    _git(folder, "tag", "v1")
    (folder / "train.py").write_text("print(2)\n")
    (folder / ".gitmodules").write_text('[submodule "x"]\n\tpath = x\n\turl = file:///nowhere\n')
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "two")
    return folder


def _git(folder: Path, *arguments: str) -> str:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env={**os.environ, **who}, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(("ref", "text"), [("main", "print(2)\n"), ("v1", "print(1)\n"), ("", "print(2)\n")])
def test_git_brings_one_commit_as_plain_files(repository: Path, tmp_path: Path, ref: str, text: str) -> None:
    target = tmp_path / "code"
    script.fetch(f"file://{repository}", ref, target)
    assert (target / "train.py").read_text() == text
    assert not (target / ".git").exists()
    about = json.loads((tmp_path / "code.json").read_text())
    assert about["commit"] == _git(repository, "rev-parse", f"{ref or 'main'}^{{commit}}")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".code")] == []


def test_git_brings_a_commit_by_its_id(repository: Path, tmp_path: Path) -> None:
    commit = _git(repository, "rev-parse", "v1^{commit}")
    script.fetch(f"file://{repository}", commit, tmp_path / "code")
    assert (tmp_path / "code" / "train.py").read_text() == "print(1)\n"


def test_git_runs_nothing_of_anybodys(repository: Path, tmp_path: Path) -> None:
    """Neither a hook from a template nor a filter that the repository asks for."""
    template = tmp_path / "template" / "hooks"
    template.mkdir(parents=True)
    for hook in ("post-checkout", "reference-transaction"):
        (template / hook).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (template / hook).chmod(0o755)
    (tmp_path / ".gitconfig").write_text(
        f"[init]\n\ttemplateDir = {template.parent}\n[core]\n\thooksPath = {template}\n[submodule]\n\trecurse = true\n"
    )
    script.fetch(f"file://{repository}", "main", tmp_path / "code")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "url", ["http://example.org/x", "git://example.org/x", "ext::sh -c true", "/etc", "-u", "file:///etc"]
)
def test_other_addresses_are_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIGIL_GIT_FILE", raising=False)
    with pytest.raises(BadPlan, match="only https:// and ssh://"):
        script.fetch(url, "main", tmp_path / "code")
    with pytest.raises(BadPlan):
        script.fetch("https://127.0.0.1:9/x", "--upload-pack=touch", tmp_path / "code")


def test_git_is_bounded(repository: Path, tmp_path: Path) -> None:
    (repository / "big").write_bytes(os.urandom(3_000_000))
    _git(repository, "add", ".")
    _git(repository, "commit", "-q", "-m", "big")
    with pytest.raises(BadPlan, match="larger than 1 MiB"):
        script.fetch(f"file://{repository}", "main", tmp_path / "code", limit=2**20)
    with pytest.raises(BadPlan, match="it took too long"):
        script.fetch(f"file://{repository}", "main", tmp_path / "code", seconds=0.0)
    with pytest.raises(BadPlan, match="asked to stop"):
        script.fetch(f"file://{repository}", "main", tmp_path / "code", stopping=lambda: True)
    with pytest.raises(BadPlan, match="cannot be fetched"):
        script.fetch(f"file://{repository}", "no-such-branch", tmp_path / "code")
    assert not (tmp_path / "code").exists()


@pytest.mark.slow
def test_a_job_from_git_runs(run: Run, repository: Path) -> None:
    run.describe(f'kind = "script"\n[script]\ngit = "file://{repository}"\nref = "main"\n')
    assert run.launch().wait(60) == 0
    assert _log(run) == "2\n"
    shutil.rmtree(repository)
    assert run.launch(restart=1).wait(60) == 0  # the same snapshot again


# Checkpoints of scripts.


@pytest.fixture
def reporting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process as a rank of a script; the folder of checkpoints."""
    attempt = tmp_path / "job" / "attempt-1"
    (attempt / "stacks").mkdir(parents=True)
    (tmp_path / "job" / "GENERATION").write_text("3\n")
    told = {"VIGIL_RUN_DIR": str(tmp_path), "VIGIL_ATTEMPT_DIR": str(attempt), "VIGIL_GENERATION": "3"}
    for name, value in {**told, "VIGIL_INCARNATION": "0", "RANK": "0", "WORLD_SIZE": "2", "VIGIL_RESUME": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(vigil_report, "_opened", None)
    monkeypatch.setattr(vigil_report, "_line", [])
    yield tmp_path / "job" / "checkpoints"
    stream = vigil_report._opened
    if stream is not None:
        stream.close()


def _file(folder: Path, name: str = "model.pt", data: bytes = b"weights") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_a_file_is_copied_whole_and_found_again(
    reporting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path)
    assert vigil_report.checkpoint(path, 40) == reporting / "step-40"
    path.write_bytes(b"changed afterwards")
    found = manifest.verify(reporting / "step-40")
    assert found.files[0] == manifest.File("model.pt", 7, hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setenv("VIGIL_RESUME", "step-40")
    assert vigil_report.resume_path() == reporting / "step-40" / "model.pt"


@pytest.mark.parametrize("names", [["a.bin", "b.json"], ["a.bin", "deep/er/b.json"], ["a name with spaces.bin"]])
def test_a_folder_comes_back_as_it_was(
    reporting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    for name in names:
        _file(tmp_path / "state", name, name.encode())
    assert vigil_report.checkpoint(tmp_path / "state", 5)
    manifest.verify(reporting / "step-5")
    monkeypatch.setenv("VIGIL_RESUME", "step-5")
    found = vigil_report.resume_path()
    assert found is not None
    assert [(found / name).read_bytes() for name in names] == [name.encode() for name in names]


def test_what_cannot_be_saved_is_said_and_hurts_nobody(
    reporting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing.pt", tmp_path / "empty", _file(tmp_path, "COMMITTED")):
        assert vigil_report.checkpoint(path, 5) is None
    path = _file(tmp_path)
    assert vigil_report.checkpoint(path, 6)
    assert vigil_report.checkpoint(path, 6) is None
    assert capsys.readouterr().err.count("no checkpoint at step") == 4
    assert [entry.name for entry in reporting.iterdir()] == ["step-6"]


def test_a_step_of_another_line_keeps_its_data(
    reporting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vigil_report.checkpoint(_file(tmp_path, data=b"old"), 6)
    monkeypatch.setenv("VIGIL_GENERATION", "4")
    (tmp_path / "job" / "GENERATION").write_text("4\n")
    assert vigil_report.checkpoint(_file(tmp_path, data=b"new"), 6)
    assert (reporting / "step-6.g3" / "model.pt").read_bytes() == b"old"
    assert (reporting / "step-6" / "model.pt").read_bytes() == b"new"


def test_an_older_launch_commits_nothing(reporting: Path, tmp_path: Path) -> None:
    (tmp_path / "job" / "GENERATION").write_text("9\n")
    assert vigil_report.checkpoint(_file(tmp_path), 6) is None
    assert not list(reporting.glob("step-*"))


def test_only_rank_0_commits(reporting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert vigil_report.checkpoint(_file(tmp_path), 6) is None
    assert not reporting.exists()


def test_outside_a_job_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIGIL_ATTEMPT_DIR", raising=False)
    vigil_report.log(1, loss=1.0)
    vigil_report.progress(1, 2)
    vigil_report.event("x")
    assert vigil_report.checkpoint(_file(tmp_path), 1) is None
    assert vigil_report.resume_path() is None
    assert not vigil_report.stopping()


def test_it_is_one_file_of_the_standard_library(tmp_path: Path) -> None:
    shutil.copy(vigil_report.__file__, tmp_path)
    source = "import vigil_report, sys; vigil_report.log(1, loss=2.0); print('training' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {source}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"
