"""Test rows that change during a save: the file has the values from before, and the rows are not all copied."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from tests.examples import examples
from tests.training.checkpoint.saved import save
from tests.waiting import until
from training.checkpoint import pinning, rows, storage
from training.checkpoint.rows import FrozenRows, Rows
from training.checkpoint.staging import Staging, release

CLIENTS, NUMBERS = 40, 6
ROW_BYTES = NUMBERS * 4


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rows, "BLOCK_BYTES", 3 * ROW_BYTES)
        yield


def values(*, plus: float = 0.0) -> Tensor:
    return torch.arange(CLIENTS * NUMBERS, dtype=torch.float32).reshape(CLIENTS, NUMBERS) + plus


def read(folder: Path) -> Tensor:
    found = torch.zeros(CLIENTS, NUMBERS)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        storage.read(storage.match_stored({"clients": {"control": found}}, folder), folder, None)
    finally:
        dist.destroy_process_group()
    return found


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.one_of(st.none(), st.sets(st.integers(0, CLIENTS - 1), min_size=1)), max_size=40))
def test_blocks_are_as_they_were_whatever_changes_between_them(steps: list[set[int] | None]) -> None:
    """None: the next block is written; else these rows change."""
    control = Rows(values())
    frozen = control.freeze()
    blocks = list(frozen.blocks())
    taken: list[Tensor] = []
    for number, step in enumerate(steps):
        if step is None and len(taken) < len(blocks):
            taken.append(frozen.take(blocks[len(taken)]))
        elif step is not None:
            where = torch.tensor(sorted(step))
            control.write(where, torch.full((len(where), NUMBERS), -1.0 - number))
        assert frozen.preserved_bytes <= (CLIENTS - sum(map(len, taken))) * ROW_BYTES
    taken += [frozen.take(block) for block in blocks[len(taken) :]]
    assert torch.equal(torch.cat(taken), values())
    assert frozen.preserved_bytes == 0


def test_a_checkpoint_has_the_rows_of_the_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows change after each block of it was written."""
    control, staging = Rows(values()), Staging(None)
    copied = staging.copy({"clients": {"control": control}})
    assert staging.bytes == 0, "no copy of them was taken"
    take, changes = FrozenRows.take, iter(range(1, 1000))

    def changing(frozen: FrozenRows, block: range) -> Tensor:
        found = take(frozen, block)
        control.write(torch.arange(CLIENTS), values(plus=next(changes)))
        return found

    monkeypatch.setattr(FrozenRows, "take", changing)
    folder = save(tmp_path, copied)
    assert torch.equal(read(folder), values())
    blocks = -(-CLIENTS // 3)
    assert torch.equal(control.tensor, values(plus=blocks))
    (about,) = storage.stored_tensors(folder).values()
    assert (about.size, len(about.chunks)) == ((CLIENTS, NUMBERS), blocks)


def test_a_checkpoint_with_a_single_chunk_is_read(tmp_path: Path) -> None:
    """Earlier versions wrote them so."""
    assert torch.equal(read(save(tmp_path, {"clients": {"control": values()}})), values())


def _change_all(control: Rows, *, block: int = 4) -> None:
    for begin in range(0, CLIENTS, block):
        control.write(torch.arange(begin, begin + block), values(plus=1)[begin : begin + block])


def test_training_waits_for_blocks_before_it_sets_more_than_a_part_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MIN_PRESERVED_BYTES", 6 * ROW_BYTES)
    control = Rows(values())
    frozen = control.freeze()
    training = Thread(target=_change_all, args=(control,))
    training.start()
    taken, most = [], 0
    for block in reversed(list(frozen.blocks())):  # the last one that it waits for comes first
        until(lambda: frozen.preserved_bytes == 4 * ROW_BYTES or not training.is_alive())
        most = max(most, frozen.preserved_bytes)
        taken.append(frozen.take(block))
    training.join(10)
    assert torch.equal(torch.cat(taken[::-1]), values())
    assert torch.equal(control.tensor, values(plus=1))
    assert 0 < most <= 6 * ROW_BYTES


@pytest.mark.parametrize("ended", [True, False], ids=["a save that has failed", "a disk that stands still"])
def test_training_does_not_wait_for(ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MIN_PRESERVED_BYTES", 6 * ROW_BYTES)
    monkeypatch.setattr(rows, "PATIENCE_SECONDS", 60.0 if ended else 0.05)
    control = Rows(values())
    frozen = control.freeze()
    training = Thread(target=_change_all, args=(control,))
    training.start()
    until(lambda: frozen.preserved_bytes > 0)
    if ended:
        frozen.release()
    training.join(10)
    assert not training.is_alive()
    assert frozen.preserved_bytes == (0 if ended else CLIENTS * ROW_BYTES)


def test_nothing_is_set_aside_for_a_save_that_has_ended() -> None:
    control, staging = Rows(values()), Staging(None)
    copied = staging.copy({"clients": {"control": control}})
    control.write(torch.arange(5), values()[:5])
    assert copied["clients"]["control"].preserved_bytes == 5 * ROW_BYTES
    release(copied)
    control.write(torch.arange(CLIENTS), values(plus=1))
    assert copied["clients"]["control"].preserved_bytes == 0


def test_rows_of_a_gpu_are_copied_to_memory_of_the_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Main memory counts as a GPU's here."""
    monkeypatch.setattr(pinning, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(pinning, "wait_for_copies", lambda: None)
    control, staging = Rows(values()), Staging(None)
    copied = staging.copy({"clients": {"control": control}})
    assert staging.bytes == control.nbytes
    control.write(torch.arange(CLIENTS), values(plus=1))
    assert torch.equal(read(save(tmp_path, copied)), values())
