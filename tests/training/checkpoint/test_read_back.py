"""Test reading back after a commit: damage is marked and replaced; a stop does not wait for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.training.ranks import TINY, Run
from training import manifest
from training.attempt.lineage import newest_on_lineage, raise_generation
from training.checkpoint.cadence import Cadence, Mtbf
from training.checkpoint.pruning import Retention
from training.checkpoint.saving import Checkpoints
from training.checkpoint.writing import ManifestFields, SaveOptions
from training.manifest import DAMAGED, VERIFIED, CheckpointError
from training.reporting.reporter import NullReporter
from training.runtime.distributed import World


class Watched(NullReporter):
    """Lets a test act at an event: at "checkpoint.committed" its files lie there, and nothing is read back yet."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.at: Callable[[str, dict[str, Any]], None] = lambda kind, data: None

    def event(self, kind: str, **data: Any) -> None:
        self.events.append((kind, data["step"]))
        self.at(kind, data)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    """A job's folder; and this process is the one rank of a world."""
    (tmp_path / "job" / "attempt-1").mkdir(parents=True)
    raise_generation(tmp_path / "job", previous=None, resume="")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tmp_path / "job"
    dist.destroy_process_group()


@pytest.fixture
def reporter() -> Watched:
    return Watched()


def checkpoints(
    job: Path, reporter: Watched, *, cadence: Cadence | None = None, keep: int = 1, **more: Any
) -> Checkpoints:
    created = Checkpoints(
        job,
        job / "attempt-1",
        more.pop("world", World(0, 1, torch.device("cpu"))),
        SaveOptions(generation=1, retention=Retention(last=keep), cadence=cadence or Cadence(0, Mtbf(3600, "assumed"))),
        reporter=reporter,
        **more,
    )
    created.start_from(None)
    return created


def save(checkpoints: Checkpoints, step: int) -> None:
    facts = ManifestFields(step=step, consumed_samples=0, layout={}, config_hash="", config={}, data="")
    checkpoints.save({"model": {"weights": torch.full((1000,), float(step))}}, facts)


def corrupt(checkpoint: Path) -> None:
    shard = next(checkpoint.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def test_a_checkpoint_that_reads_back_differently_is_marked_reported_and_no_parent(
    job: Path, reporter: Watched
) -> None:
    def at(kind: str, data: dict[str, Any]) -> None:
        if kind == "checkpoint.committed" and data["step"] in (3, 4):
            corrupt(job / "checkpoints" / data["name"])

    reporter.at = at
    cadence = Cadence(0, Mtbf(3600, "assumed"))
    created = checkpoints(job, reporter, cadence=cadence)
    for step in (1, 2):
        save(created, step)
        created.wait()
        assert not cadence.is_due(step + 1)
    save(created, 3)
    with pytest.raises(CheckpointError, match="step-3 was not read back as it was written: .*sha256 differs"):
        created.wait()
    damaged = job / "checkpoints" / "step-3"
    assert "sha256 differs" in (damaged / DAMAGED).read_text()
    assert not (damaged / VERIFIED).exists()
    assert newest_on_lineage(job) == "step-2"
    assert created.latest is not None
    assert created.latest.step == 2
    assert cadence.is_due(4), "made up for at the next boundary"
    save(created, 4)
    created.finish_save()
    assert not cadence.is_due(5), "a disk that spoils all it is given is not filled"
    save(created, 5)
    assert created.wait().parent == (2, 1)
    assert [step for kind, step in reporter.events if kind == "checkpoint.damaged"] == [3, 4]
    assert [found.step for found in manifest.committed(job / "checkpoints")] == [2, 5]
    assert manifest.read(job / "checkpoints" / "step-5").ancestors == ((1, 1), (2, 1))


def test_reading_back_ends_when_a_stop_is_requested(
    job: Path, reporter: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 64)
    requests: list[bool] = []

    def is_requested() -> bool:
        requests.append(len(requests) >= 3)
        return requests[-1]

    created = checkpoints(job, reporter, is_stop_requested=is_requested)
    save(created, 1)
    found = created.wait()
    assert sum(requests) == 1, "of some sixty pieces"
    folder = job / "checkpoints" / found.name
    assert not (folder / VERIFIED).exists(), "so nothing is known of it"
    assert not (folder / DAMAGED).exists()
    assert newest_on_lineage(job) == "step-1"
    save(created, 2)
    assert created.wait().parent == (1, 1)
    state = {"model": {"weights": torch.zeros(1000)}}
    created.restore(state, found)
    assert state["model"]["weights"].eq(1).all()
    assert (folder / VERIFIED).exists(), "whoever starts from it has read all of it"


def test_threads_stay_on_the_gpu_of_their_rank(job: Path, reporter: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what they do first would take memory on GPU 0 for a context of each rank's."""
    chosen: dict[str, Any] = {}
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.update({threading.current_thread().name: device})
    )
    gpu = torch.device("cuda", 1)
    created = checkpoints(job, reporter, world=World(0, 1, gpu))
    created.prepare({"model": {"weights": torch.zeros(1000)}})
    save(created, 1)
    created.wait()
    assert chosen == {"checkpoint-memory": gpu, "checkpoint": gpu}


def spoil_two_saves() -> None:
    """Spoil the save of step 4 in each rank, and the first one of the last step."""
    from training.reporting.reporter import Reporter

    event, todo = Reporter.event, {4, 12}

    def spoiling(reporter: Reporter, kind: str, **data: Any) -> None:
        event(reporter, kind, **data)
        if kind == "checkpoint.committed" and data["step"] in todo:
            todo.remove(data["step"])
            corrupt(Path(os.environ["VIGIL_RUN_DIR"]) / "job" / "checkpoints" / data["name"])

    Reporter.event = spoiling  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_run_saves_again_what_was_damaged(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {**TINY}, spy=f"{__name__}:{spoil_two_saves.__name__}")
    run.finish(2)
    assert [event["step"] for event in run.events("checkpoint.damaged")] == [4, 12]
    assert [(found.name, found.parent) for found in run.checkpoints] == [
        ("step-5", None),
        ("step-8", (5, 1)),
        ("step-12", (8, 1)),
    ]
    assert newest_on_lineage(run.job_dir) == "step-12"
    folder = run.job_dir / "checkpoints"
    assert sorted(path.parent.name for path in folder.glob(f"*/{DAMAGED}")) == ["step-12.g1", "step-4"]
