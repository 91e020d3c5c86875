"""Test `python -m training compare`: what it refuses, runs and prints."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from tests.waiting import until
from training.attempt.heartbeat import read_beat
from training.compare import candidates, command, picture, running
from training.compare.results import CandidateResult, Comparison
from training.compare.running import CandidateRun, toml
from training.compare.table import table
from training.config.run_config import parse
from training.launch.attempt import Attempt
from training.launch.stop import Signals

TINY = """
name = "both ways"
[resources]
gpus_per_node = 0
ranks_per_node = 2
[run]
global_batch = 4
learning_rate = 1e-2
[run.language]
layers = 2
heads = 2
head_width = 8
context = 16
dropout = 0.1
"""
BASE = parse(tomllib.loads(TINY)["run"])


def refused(*changes: str, ranks: int = 2, steps: int = 40) -> list[str]:
    with pytest.raises(candidates.ComparisonError) as caught:
        candidates.candidates(BASE, changes, steps=steps, ranks=ranks)
    return caught.value.lines


# What is requested.


def test_ddp_and_fsdp_are_compared_by_default():
    ddp, fsdp = candidates.candidates(BASE, [], steps=40, ranks=2)
    assert (ddp.name, ddp.config.parallelism) == ("ddp", "ddp")
    assert (fsdp.name, fsdp.config.parallelism) == ("fsdp", "fsdp")
    for item in (ddp, fsdp):
        assert (item.config.steps, item.config.validate_every, item.config.warmup_steps) == (40, 0, 8)
        assert item.config.options["language"] == BASE.options["language"]


def test_what_only_the_run_itself_wants_is_not_measured():
    base = parse({"profile_at": 5, "keep_best": 2, "validate_every": 10})
    for candidate in candidates.candidates(base, [], steps=20, ranks=2):
        assert (candidate.config.profile_at, candidate.config.keep_best, candidate.config.validate_every) == (0, 0, 0)


def test_a_change_replaces_the_setting_of_the_run_and_its_unused_options():
    base = parse({"parallelism": "ddp", "ddp": {"bucket_mib": 5.0}, "mesh": {"dp": 2}})
    changes = ["ddp=ddp.bucket_mib=9", "fsdp=parallelism=fsdp,fsdp.reshard=never,mesh.dp="]
    ddp, fsdp = candidates.candidates(base, changes, steps=20, ranks=2)
    assert ddp.config.options_of("ddp")["bucket_mib"] == 9
    assert fsdp.config.options_of("fsdp")["reshard"] == "never"
    assert "ddp" not in fsdp.config.options
    assert (ddp.config.mesh, fsdp.config.mesh) == ({"dp": 2}, {})


def test_options_of_what_auto_may_choose_stay():
    base = parse({"parallelism": "auto", "global_batch": 4, "fsdp": {"reshard": "never"}})
    half, fsdp, ddp = candidates.candidates(
        base, ["half=dtype=bf16", "fsdp=parallelism=fsdp", "ddp=parallelism=ddp"], steps=20, ranks=2
    )
    for item in (half, fsdp):
        assert item.config.options_of("fsdp").get("reshard") == "never"
    assert "fsdp" not in ddp.config.options


def test_everything_that_cannot_work_is_reported_at_once_by_name():
    lines = refused("a=parallelism=fdsp", "b=mesh.tp=3", "c=dtype=fp8,mesh.tp=2", "d=compile=maybe")
    assert [line.split(": ")[:2] for line in lines] == [
        ["a", "run.parallelism"],
        ["b", "run.mesh.tp"],
        ["c", "run.dtype"],
        ["d", "run.compile"],
    ]
    assert 'Did you mean "fsdp"' in lines[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("a=seed=2", "determines what is trained"),
        ("a=language.layers=3", "determines what is trained"),
        ("a=steps=9", "Use --steps"),
        ("a=checkpoint_every=4", "one checkpoint at the end"),
        ("a=mesh", "is not a setting"),
        ("a", "write NAME=setting=value"),
        ("two words=dtype=bf16", "write NAME=setting=value"),
        ("b=dtype=bf16", "is given twice"),
        ("a=steps.x=1", "Use --steps"),
        ("a=dtype.x=1", "is a setting, not a table"),
    ],
)
def test_what_would_not_be_a_comparison_is_refused(change: str, message: str):
    assert any(message in line for line in refused("b=dtype=fp32", change))


def test_more_ranks_than_gpus_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "gpus", lambda visible: {"gpus": [{"name": "NVIDIA H200"}]})
    (tmp_path / "run.toml").write_text(TINY.replace("gpus_per_node = 0\n", ""))
    assert command.compare(command.options([str(tmp_path / "run.toml")])) == 2
    assert "2 ranks need a GPU each, but only 1 are available" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.toml").write_text(TINY)
    assert command.compare(command.options([str(tmp_path / "run.toml"), "--out", str(tmp_path)])) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_single_configuration_and_too_few_steps_are_refused():
    assert "only one configuration is given" in refused("a=dtype=bf16")[0]
    assert "The minimum is 12" in refused(steps=5)[0]
    apart = refused("b=dtype=fp32", "a=communication=diloco", steps=40)
    assert apart[0].endswith("Write --steps 112, or a smaller one.")
    assert "has its own training loop" in refused("b=dtype=fp32", "a=communication=parameter_server")[0]


def test_run_files_are_written_as_they_are_read():
    document: dict[str, Any] = {
        "name": 'a "b"\\ \x7f é\n',
        "run": {"x": 1e-5, "y": True, "mesh": {"tp": 2}, "l": [1, 2]},
    }
    assert tomllib.loads(toml(document)) == document
    config = parse({"parallelism": "fsdp", "mesh": {"tp": 2}, "dtype": "bf16"})
    assert parse(tomllib.loads(toml({"run": config.model_dump()}))["run"]) == config


# What is reported.


def candidate_run(name: str, number: int, rate: float, *, loss: float = 2.0, sent: float | None = None) -> CandidateRun:
    """Return a run of 2 ranks at this rate, in tokens per second and rank."""
    return CandidateRun(
        name=name,
        round=number,
        device="cpu",
        mesh={"dp": 2},
        unit="tokens",
        units_per_step=1000,
        step_seconds=[0.9 * 500 / rate, 500 / rate, 99.0],
        peak_bytes=[100 * 2**20, 120 * 2**20],
        losses={step: loss + 1 / step for step in range(1, 21)},
        stall_seconds=0.0123,
        checkpoint_bytes=3 * 2**30,
        write_seconds=2.5,
        sent_mib=sent,
    )


def recorded() -> Comparison:
    ddp = CandidateResult(
        "ddp", "parallelism=ddp", [candidate_run("ddp", n, rate, sent=1.5) for n, rate in ((1, 100.0), (2, 200.0))]
    )
    slow = CandidateResult(
        "<fsdp>", "…", [candidate_run("<fsdp>", n, rate, loss=2.25) for n, rate in ((1, 50.0), (2, 150.0))]
    )
    for run in slow.runs:
        run.losses[7] += 0.25
    broken = CandidateResult("broken", "…", [], "round 1: rank 0: no")
    return Comparison(name="a & b", machine="here", ranks=2, steps=20, rounds=2, seed=0, results=[broken, ddp, slow])


def test_the_table_pairs_rounds_and_aligns_columns():
    text = table(recorded())
    lines = {re.split(r" {3,}", line.strip())[0]: line.split() for line in text.splitlines()}
    assert "2 ranks on cpu" in text
    assert "broken failed: round 1: rank 0: no" in text
    assert lines["tokens/s per rank"][-2:] == ["150", "100"]
    assert lines["relative to ddp, median"][-2:] == ["–", "0.625×"], "the median of 50/100 and 150/200"
    assert lines["lowest to highest"][-1] == "0.500–0.750"
    assert lines["peak memory per rank, beyond imports"][-4:] == ["120", "MiB", "120", "MiB"]
    assert lines["largest difference"][-4:] == ["0.5", "at", "step", "7"]
    assert lines["checkpoint, stall"][-4:] == ["12.3", "ms", "12.3", "ms"]
    assert lines["checkpoint, size"][-2:] == ["3.00", "GiB"]
    assert lines["sent per rank and step"][-3:] == ["1.50", "MiB", "unknown"]
    rows = text.split("\n\n")[1].splitlines()
    assert len({len(row) for row in rows}) == 1


def test_the_picture_is_a_well_formed_image_in_both_lights():
    drawn = picture.draw(recorded())
    root = ElementTree.fromstring(drawn)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "tokens/s per rank" in words
    assert words.count("<fsdp>") == 4, "in each panel, and nothing of the name is markup"
    assert "unknown" in words
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
    assert "prefers-color-scheme:dark" in drawn
    height = float(root.attrib["height"])
    assert all(0 <= float(word.attrib["y"]) <= height for word in root.iter("{http://www.w3.org/2000/svg}text"))


def test_a_loss_that_is_no_number_spoils_no_picture():
    run = candidate_run("ddp", 1, 100.0)
    run.losses.update({3: math.nan, 4: math.inf})
    other = candidate_run("fsdp", 1, 100.0)
    both = [CandidateResult("ddp", "", [run]), CandidateResult("fsdp", "", [other])]
    comparison = Comparison(name="a", machine="here", ranks=2, steps=20, rounds=1, seed=0, results=both)
    assert "nan" not in picture.draw(comparison)
    json.dumps(comparison.to_dict())


# Real ranks.


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "run.toml").write_text(TINY)
    command = [sys.executable, "-m", "training", "compare", "run.toml", "--out", "out", *arguments]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [environment.pop("first", ""), root]))
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


class Copying:
    """Stand in for the launcher: copy the weights next to the adapters, then fail."""

    def __init__(self, plan: Any, attempt: Attempt, **_: Any) -> None:
        self._base = attempt.folder.parent / "base"

    def run(self) -> int:
        self._base.mkdir()
        (self._base / "model.safetensors").write_bytes(b"large")
        return 1


def test_no_copy_of_the_weights_is_left_for_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running, "Launcher", Copying)
    (item, _) = candidates.candidates(BASE, [], steps=20, ranks=2)
    work = running.ComparisonWork(ranks=2, steps=20, on_cpu=True, out=tmp_path, cache=tmp_path)
    with pytest.raises(running.RunFailed):
        running.run(item, 1, work, Signals(), lambda attempt: None)
    assert (tmp_path / "ddp-1" / "job" / "attempt-1").exists()
    assert not (tmp_path / "ddp-1" / "job" / "base").exists()


@pytest.mark.slow
def test_two_configurations_on_two_ranks_train_the_same_and_a_failing_configuration_is_named(tmp_path: Path):
    (tmp_path / "first" / "torchao").mkdir(parents=True)
    (tmp_path / "first" / "torchao" / "__init__.py").write_text("raise ImportError('not here')")
    apart = "apart=communication=local_sgd,local_sgd.every=3"
    ways = ("ddp=parallelism=ddp", "half=dtype=fp8", "fsdp=parallelism=fsdp", apart)
    options = [word for way in ways for word in ("--with", way)]
    process = start(tmp_path, "--steps", "16", "--rounds", "1", *options, first=str(tmp_path / "first"))
    text, _ = process.communicate(timeout=180)
    assert process.returncode == 1, text
    assert "half failed: round 1: rank" in text
    assert "needs the package torchao" in text
    payload = json.loads((tmp_path / "out" / "compare.json").read_text())
    ddp, half, fsdp, local = payload["results"]
    assert half["failure"]
    assert "runs" not in half
    assert fsdp["largest_loss_difference"] < 1e-5
    assert len(ddp["runs"][0]["step_seconds"]) == 7, "from the beginning of the ninth step to that of the last"
    assert len(local["runs"][0]["step_seconds"]) == 2, "whole stretches from one exchange to the next"
    assert local["sent_mib_per_step"] == pytest.approx(ddp["sent_mib_per_step"] / 3)
    for item in (ddp, fsdp):
        (run,) = item["runs"]
        assert sorted(map(int, run["losses"])) == list(range(1, 17))
        assert item["tokens_per_second_per_rank"] > 0
        assert min(run["peak_bytes"]) > 0
        assert 0 < item["stall_seconds"] < 5
        assert item["checkpoint_bytes"] > 3 * 4 * 1000, "parameters and two moments of each"
        assert item["sent_mib_per_step"] > 0
    ElementTree.parse(tmp_path / "out" / "compare.svg")
    assert not list((tmp_path / "out").glob("*/job/checkpoints")), "large, and of no more use"


@pytest.mark.slow
def test_ctrl_c_ends_every_process(tmp_path: Path):
    process = start(tmp_path, "--steps", "100000")
    beats = tmp_path / "out" / "ddp-1" / "job" / "attempt-1" / "heartbeat" / "0.0"
    until(lambda: (beat := read_beat(beats)) and beat.phase == "step")
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 2
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 130, text
    assert "stopped; no process is left running" in text
    assert not psutil.wait_procs(below, timeout=5)[1]
