"""Test a user's program as ranks: its environment, reports, resumes and stops."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.training.launching import Run
from tests.waiting import PATIENCE_S, until
from training import manifest
from training.reporting.spool import read_spool

ENVIRONMENT = """
import json, os, sys
print(json.dumps({"environment": dict(os.environ), "arguments": sys.argv[1:], "path": sys.path, "place": os.getcwd()}))
"""


def _printed(run: Run, rank: int = 0) -> dict[str, object]:
    payload: dict[str, object] = json.loads((run.attempt() / "logs" / f"0.{rank}.log").read_text())
    return payload


@pytest.mark.slow
def test_a_rank_sees_torchruns_variables_and_nothing_it_should_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ("SECRET_KEY", "DATABASE_URL", "VIGIL_HOME", "SLURM_JWT", "HF_TOKEN")
    for name in secret:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    described = 'args = ["--a", "b c"]\n[script.env]\nMINE = "yes"\n'
    assert run.script(ENVIRONMENT, ranks=2, script=described).wait(PATIENCE_S) == 0
    for rank in range(2):
        report = _printed(run, rank)
        environment = report["environment"]
        assert isinstance(environment, dict)
        expected = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1", "MINE": "yes",
            "NCCL_DEBUG": "INFO", "VIGIL_RUN_DIR": str(run.path), "VIGIL_RESUME": "", "VIGIL_GENERATION": "1",
        }  # fmt: skip
        assert {name: environment.get(name) for name in expected} == expected
        assert 1024 < int(environment["MASTER_PORT"]) < 65536
        assert not set(secret) & set(environment)
        assert report["arguments"] == ["--a", "b c"]
        assert report["place"] == str(run.path / "job" / "code")
        assert environment["PYTHONPATH"] == str(run.attempt() / "lib")
        assert os.listdir(run.attempt() / "lib") == ["vigil_report.py"]


@pytest.mark.slow
def test_a_script_that_reports_nothing_still_has_logs_and_resource_use(run: Run) -> None:
    source = "import time\nprint('hello')\nx = bytearray(80 * 2**20)\ntime.sleep(1.5)\n"
    assert run.script(source).wait(PATIENCE_S) == 0
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
    assert run.script(REPORTING.format(steps=25, accident="")).wait(PATIENCE_S) == 0
    assert run.losses()[0] == {step: 1 / step for step in range(1, 26)}
    assert run.events("progress")[-1]["steps"] == 25
    names = [event["name"] for event in run.events("checkpoint.committed")]
    assert names == ["step-10", "step-20"]
    found = manifest.verify(run.path / "job" / "checkpoints" / "step-20")
    assert (found.step, found.generation, found.parent, found.ancestors) == (20, 1, (10, 1), ((10, 1),))
    assert found.consumed_samples == 80


@pytest.mark.slow
def test_a_script_resumes_from_its_last_checkpoint(run: Run) -> None:
    accident = "os.environ['VIGIL_INCARNATION'] == '0' and step == 17 and os.kill(os.getpid(), 9)"
    assert run.script(REPORTING.format(steps=30, accident=accident)).wait(PATIENCE_S) == 0
    assert sorted(run.losses()[1]) == list(range(11, 31))
    last = run.events("checkpoint.committed")[-1]
    assert (last["step"], last["parent_step"], last["parent_generation"]) == (30, 20, 2)


@pytest.mark.slow
def test_a_script_that_polls_for_stops_saves_and_stops(run: Run) -> None:
    launcher = run.script(REPORTING.format(steps=10**6, accident=""))
    until(lambda: run.attempt().exists() and run.losses().get(0))
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 75
    step = json.loads((run.attempt() / "stopped.json").read_text())["step"]
    assert [event["step"] for event in run.events("stop.saved")] == [step]
    again = run.script(REPORTING.format(steps=step + 5, accident=""))
    run.launchers[-1].wait(PATIENCE_S)
    assert again.returncode == 75  # the very same submission: its verdict stands
    third = run.launch(restart=1)
    assert third.wait(PATIENCE_S) == 0
    assert sorted(run.losses(2)[0]) == list(range(step + 1, step + 6))
    run.assert_nothing_left()


LEAVING = """
import sys, time
import vigil_report
for step in range(1, 10**6):
    time.sleep(0.01)
    stopping = vigil_report.stopping()
    {each}
    if stopping:
        {last}
        sys.exit(0)
    print("ready", flush=True)
"""
COUNTED = "vigil_report.progress(step, 900)"
SAVED = "step == 1 and vigil_report.checkpoint(__file__, step)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("each", "last", "code", "cause"),
    [
        (COUNTED, "", 1, "unsaved"),
        ("", "open('own.pt', 'w').close()", 1, "unsaved"),  # saved where Vigil knows nothing of it
        (f"{COUNTED}; {SAVED}", "", 75, "stopped"),
        ("vigil_report.checkpoint(__file__, step)", "vigil_report.checkpoint(__file__, step)", 75, "stopped"),
        (COUNTED, "vigil_report.finished()", 0, "completed"),
        (COUNTED, "vigil_report.progress(900, 900); vigil_report.checkpoint(__file__, 900)", 0, "completed"),
    ],
)
@pytest.mark.sampled(2)
def test_what_exit_code_0_means_after_a_stop_request(run: Run, each: str, last: str, code: int, cause: str) -> None:
    launcher = run.script(LEAVING.format(each=each or "pass", last=last or "pass"))
    until(lambda: run.attempt().exists() and "ready" in run.rank_log())
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(PATIENCE_S) == code, run.log()
    assert run.result()["cause"] == cause
    assert ("with no checkpoint reported" in run.result()["error"]) is (cause == "unsaved")
    assert "no checkpoint at step" not in run.rank_log()


@pytest.mark.slow
def test_a_script_that_ends_by_itself_is_complete_whatever_progress_it_reported(run: Run) -> None:
    assert run.script("import vigil_report\nvigil_report.progress(66, 900)\n").wait(PATIENCE_S) == 0
    assert run.result()["cause"] == "completed"


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
def test_a_handler_of_the_script_gets_term(run: Run) -> None:
    launcher = run.script(HANDLER)
    until(lambda: run.attempt().exists() and "ready" in run.rank_log())
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 0
    assert "leaving" in run.rank_log()


@pytest.mark.slow
def test_a_script_that_knows_no_stop_ends_by_term(run: Run) -> None:
    launcher = run.script("import time\nprint('ready', flush=True)\ntime.sleep(3600)\n")
    until(lambda: run.attempt().exists() and "ready" in run.rank_log())
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 143
    assert run.result()["cause"] == "stopped"
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_failing_script_gives_its_code_and_last_word(run: Run) -> None:
    assert run.script("import sys\nprint('no data')\nsys.exit(7)\n").wait(PATIENCE_S) == 7
    first = run.result()["first_failure"]
    assert (first["kind"], first["exit_code"], first["error"]) == ("exception", 7, "")
    assert first["last_lines"][-1] == "no data"


@pytest.mark.slow
def test_a_port_that_was_taken_is_tried_again(run: Run) -> None:
    source = """
import os
if os.environ["VIGIL_INCARNATION"] == "0":
    raise RuntimeError("The server socket has failed to listen on any local network address. port: 1, EADDRINUSE")
"""
    assert run.script(source, launch="in_place = 0\n").wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_a_wrong_entry_is_in_the_result_and_the_events(run: Run) -> None:
    assert run.script("", script='entry = "run.py"\n').wait(PATIENCE_S) == 2
    assert run.result()["error"] == "script.entry = 'run.py' is not in the directory (it has train.py)"
    assert run.events("run.failed")[0]["error"] == run.result()["error"]


@pytest.mark.slow
def test_two_ranks_of_a_script_meet_through_torch(run: Run) -> None:
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
    shutil.copytree(Path(__file__).parents[3] / "examples" / "script", run.path / "job" / "code")
    source = (run.path / "job" / "code" / "train.py").read_text()
    assert run.script(source, ranks=2, script='args = ["--steps", "60"]\n').wait(120) == 0
    assert sorted(run.losses(rank=1)[0]) == list(range(1, 61))
