"""Test that a checkpoint of another model is refused before any of it is read, naming what does not fit."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from tests.training.checkpoint.saved import save
from training.checkpoint import storage
from training.checkpoint.contents import read_metadata
from training.manifest import CheckpointError


def state(**changes: Any) -> dict[str, Any]:
    model = {"tokens": torch.ones(4, 3), "head": torch.ones(3, 4), **changes}
    return {"model": {name: value for name, value in model.items() if value is not None}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    payload = {**state(), "comm": {"rank0": {"errors": torch.ones(5)}}}
    return save(tmp_path_factory.mktemp("storage"), payload)


def test_what_fits_is_matched_to_the_tensors_of_the_run(checkpoint: Path) -> None:
    current = state()
    found = storage.match_stored(current, checkpoint)
    assert found["model"]["tokens"] is current["model"]["tokens"]
    storage.check_complete(checkpoint, storage.names(current))


WRONG = {
    "a layer more": (state(more=torch.ones(1)), "it has no model.more, which this run's model needs"),
    "a layer less": (state(head=None), "it has model.head, which this run's model does not have"),
    "another width": (
        state(head=torch.ones(3, 8)),
        r"model.head has shape \[3, 4\] in it, but \[3, 8\] in this run's model",
    ),
}


@pytest.mark.parametrize(("current", "message"), WRONG.values(), ids=WRONG)
def test_another_model_is_refused_by_name(checkpoint: Path, current: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        storage.check_complete(checkpoint, storage.names(storage.match_stored(current, checkpoint)))


def test_communication_state_that_does_not_fit_is_reset(checkpoint: Path) -> None:
    fits, other = {"errors": torch.zeros(5)}, {"errors": torch.zeros(7)}
    found = storage.match_stored({**state(), "comm": {"rank0": fits}}, checkpoint)
    assert found["comm"]["rank0"] == fits
    assert "comm" not in storage.match_stored({**state(), "comm": {"rank0": other, "rank1": fits}}, checkpoint)


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
    with pytest.raises(CheckpointError, match="not a valid table of contents"):
        storage.match_stored(state(), tmp_path)
    (tmp_path / ".metadata").write_text("hello")
    with pytest.raises(CheckpointError, match="not a valid table of contents"):
        storage.match_stored(state(), tmp_path)


class Malice:
    """An object that does something when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_nothing_but_tensors_is_read(tmp_path: Path) -> None:
    """A checkpoint has an object in place of a tensor: torch's planner would unpickle it."""
    mark = tmp_path / "was run"
    created = save(tmp_path, state(head=Malice(mark)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(CheckpointError, match="is not a tensor in it"):
            storage.read(state(), created, None)
    finally:
        dist.destroy_process_group()
    assert not mark.exists()


def _write_contents(checkpoint: Path, content: bytes) -> None:
    """A table of contents of somebody else's making, which the manifest calls right."""
    (checkpoint / ".metadata").write_bytes(content)
    payload = json.loads((checkpoint / "COMMITTED").read_text())
    for entry in payload["files"]:
        if entry["file"] == ".metadata":
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "COMMITTED").write_text(json.dumps(payload))


@pytest.mark.parametrize("place", ["/tmp/elsewhere.distcp", "../step-2/__0_0.distcp", "unlisted"])
def test_nothing_outside_the_checkpoint_is_read(tmp_path: Path, place: str) -> None:
    """torch's reader opens any path in the table of contents, such as another job's checkpoint."""
    created = save(tmp_path, state())
    contents = read_metadata(created)
    elsewhere = {index: replace(about, relative_path=place) for index, about in contents.storage_data.items()}
    _write_contents(created, pickle.dumps(replace(contents, storage_data=elsewhere)))
    with pytest.raises(CheckpointError, match="is in none of the checkpoint's files"):
        storage.match_stored(state(), created)


@pytest.mark.parametrize("name", ["pathlib\nPosixPath", "torch.distributed.checkpoint.metadata\nMetadata"])
def test_a_table_of_contents_changes_no_class_of_ours(tmp_path: Path, name: str) -> None:
    """A pickle may set attributes of a class that it names, such as the file behind every path."""
    created = save(tmp_path, state())
    _write_contents(created, f"c{name}\n(N}}S'_str'\nS'/etc/passwd'\nstb.".encode())
    with pytest.raises(CheckpointError, match="not a valid table of contents"):
        storage.match_stored(state(), created)
    assert not hasattr(Metadata, "_str")
    assert str(tmp_path / "anything").endswith("anything")


_PROPERTIES = b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81"
_METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81"
LYING = {
    "a state that torch refuses": _PROPERTIES + b"(ctorch\nfloat32\nNI01\nI7\nI00\ntb.",
    "more bytes than there are": b"\x8e" + b"\xff" * 7 + b"\x7f",
    "a module of another Python": b"cpathlib._local\nPurePath\n.",
    "nothing in it": _METADATA + b".",
    "lists for tables": _METADATA + b"}(S'state_dict_metadata'\n]S'storage_data'\n]ub.",
    "a number for a tensor": _METADATA + b"}(S'state_dict_metadata'\n}S'model.head'\nI5\nsS'storage_data'\n}ub.",
}


@pytest.mark.parametrize("content", LYING.values(), ids=LYING)
def test_a_table_of_contents_that_lies_is_refused_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    created = save(tmp_path, state())
    _write_contents(created, content)
    with pytest.raises(CheckpointError, match="not a valid table of contents"):
        storage.match_stored(state(), created)


def test_a_table_of_contents_that_nobody_signed_is_not_read(tmp_path: Path) -> None:
    created = save(tmp_path, state())
    payload = json.loads((created / "COMMITTED").read_text())
    payload["files"] = [entry for entry in payload["files"] if entry["file"] != ".metadata"]
    (created / "COMMITTED").write_text(json.dumps(payload))
    with pytest.raises(CheckpointError, match="is not among the files of its manifest"):
        storage.match_stored(state(), created)
    (created / ".metadata").unlink()
    os.mkfifo(created / ".metadata")
    with pytest.raises(CheckpointError, match="not a plain file"):
        storage.match_stored(state(), created)


def test_a_tensor_larger_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    created = save(tmp_path, state())
    contents = read_metadata(created)
    contents.state_dict_metadata["model.head"].size = torch.Size([2**40, 2**10])
    _write_contents(created, pickle.dumps(contents))
    with pytest.raises(CheckpointError, match="what it says of 'model.head' is impossible"):
        storage.match_stored(state(), created)
