"""A checkpoint of another model is refused before anything of it is read, by the name of what does not fit."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.training.checkpoint.saved import save
from training.checkpoint import storage
from training.manifest import CheckpointError


def state(**changes: Any) -> dict[str, Any]:
    model = {"tokens": torch.ones(4, 3), "head": torch.ones(3, 4), **changes}
    return {"model": {name: value for name, value in model.items() if value is not None}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = {**state(), "comm": {"rank0": {"errors": torch.ones(5)}}}
    return save(tmp_path_factory.mktemp("storage"), made)


def test_what_fits_is_found_in_the_runs_own_tensors(checkpoint: Path) -> None:
    mine = state()
    found = storage.find(mine, checkpoint)
    assert found["model"]["tokens"] is mine["model"]["tokens"]
    storage.check_complete(checkpoint, storage.names(mine))


WRONG = {
    "a layer more": (state(more=torch.ones(1)), "it has no model.more, which this run's model needs"),
    "a layer less": (state(head=None), "it has model.head, for which this run's model has no place"),
    "another width": (state(head=torch.ones(3, 8)), r"model.head is \[3, 4\] in it, and \[3, 8\] in this run's model"),
}


@pytest.mark.parametrize(("mine", "message"), WRONG.values(), ids=WRONG)
def test_another_model_is_refused_by_name(checkpoint: Path, mine: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        storage.check_complete(checkpoint, storage.names(storage.find(mine, checkpoint)))


def test_memory_of_communication_is_begun_anew_where_it_does_not_fit(checkpoint: Path) -> None:
    fits, other = {"errors": torch.zeros(5)}, {"errors": torch.zeros(7)}
    found = storage.find({**state(), "comm": {"rank0": fits}}, checkpoint)
    assert found["comm"]["rank0"] == fits
    assert "comm" not in storage.find({**state(), "comm": {"rank0": other, "rank1": fits}}, checkpoint)


def test_where_there_is_a_gpu_writing_does_not_wait_for_what_training_has_queued_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is in main memory already; its thread has the stream that training has."""
    waited: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            waited.append("for the stream")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    trainings = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: trainings)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    large = {"model": {str(number): torch.ones(1_500_000) for number in range(3)}}
    save(tmp_path, large)
    assert not waited


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no table of contents"):
        storage.find(state(), tmp_path)
    (tmp_path / ".metadata").write_text("hello")
    with pytest.raises(CheckpointError, match="no table of contents"):
        storage.find(state(), tmp_path)


class Malice:
    """An object that does something when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_nothing_but_tensors_is_read(tmp_path: Path) -> None:
    """Where a checkpoint has an object for what is a tensor here: torch's own planner unpickles it."""
    mark = tmp_path / "was run"
    made = save(tmp_path, state(head=Malice(mark)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(CheckpointError, match="is no tensor in it"):
            storage.read(state(), made, None)
    finally:
        dist.destroy_process_group()
    assert not mark.exists()
