"""Test the order of data, its division between ranks, and adding a recipe or parallelism (protocols.md §5, §7)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.training.ranks import TINY, Run, fork
from training.corpus.cache import cache_dir
from training.data import Ids
from training.loader.order import Loader, Order, Share, fixed_batch
from training.recipes import language, vision
from training.runtime.seeds import derive_seed

BATCH = 12


@pytest.mark.parametrize("samples", [1, 2, 3, 10, 97, 1000])
def test_every_epoch_has_a_different_permutation(samples: int) -> None:
    order = Order(samples, seed=7)
    epochs = [order.ids(np.arange(epoch * samples, (epoch + 1) * samples)).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    if samples >= 10:
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs[0] != Order(samples, seed=8).ids(np.arange(samples)).tolist()


def test_the_order_appears_random() -> None:
    """Neighbours end up far apart, and each place is as likely to get any part of the data."""
    ids = Order(100_000, seed=3).ids(np.arange(100_000))
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.02
    counts, _ = np.histogram(ids[:20_000], bins=10)
    assert counts.min() > 1800
    assert counts.max() < 2200


def test_the_order_is_pinned() -> None:
    """Checkpoints of other days depend on it: it must never change."""
    assert Order(1000, seed=1).ids(np.array([0, 1, 2, 999, 1000, 123_456_789])).tolist() == PINNED
    assert derive_seed(1, 2, 3) == 0xB19F667B2781FDF0


PINNED = [504, 673, 787, 24, 556, 898]


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 12])
def test_ids_are_the_same_on_any_number_of_ranks_and_after_a_shrink(micro_batch: int) -> None:
    order = Order(50, seed=5)  # an epoch of 4 1/6 steps: batches straddle epochs
    expected = [_step(order, [Share(0, 1, BATCH, BATCH)], step) for step in range(20)]
    for world in (1, 2, 3, 4, 5, 7):
        shares = [Share(rank, world, BATCH, micro_batch) for rank in range(world)]
        assert [_step(order, shares, step) for step in range(20)] == expected
    shrunk = [4, 4, 4, 3, 3, 2, 1, 1]
    for step, world in enumerate(shrunk):
        shares = [Share(rank, world, BATCH, micro_batch) for rank in range(world)]
        assert _step(order, shares, step) == expected[step]


def _step(order: Order, shares: Sequence[Share], step: int) -> list[int]:
    ids: list[int] = []
    for share in shares:
        for part in Loader(order, share).ids(step * BATCH):
            assert len(part) <= share.micro_batch
            ids += part.tolist()
    return ids


def test_a_loader_gives_the_same_from_any_position() -> None:
    order, share = Order(10_000, seed=1), Share(1, 3, BATCH, 2)
    going = Loader(order, share)
    for step in range(2000):  # beyond what it computes at once
        parts = going.ids(step * BATCH)
        if step % 499 == 0:
            assert _lists(parts) == _lists(Loader(order, share).ids(step * BATCH))


def _lists(parts: list[Ids]) -> list[list[int]]:
    return [part.tolist() for part in parts]


def test_validation_takes_each_sample_once() -> None:
    for world in (1, 2, 3, 4):
        indices: list[int] = []
        for batch in range(5):
            for rank in range(world):
                share = Share(rank, world, BATCH, 5)
                indices += [i for part in fixed_batch(batch, batches=5, samples=50, share=share) for i in part]
        assert sorted(indices) == list(range(50))


def test_a_short_validation_samples_all_parts_of_the_data() -> None:
    """The first samples alone are often one document's."""
    for world in (1, 3):
        shares = [Share(rank, world, BATCH, 5) for rank in range(world)]
        taken = [fixed_batch(batch, batches=2, samples=1000, share=share) for batch in range(2) for share in shares]
        indices = [int(i) for parts in taken for part in parts for i in part]
        assert len(set(indices)) == 2 * BATCH
        assert np.histogram(indices, bins=8, range=(0, 1000))[0].tolist() == [3] * 8


@pytest.mark.slow
def test_shards_are_made_once_even_by_a_race(tmp_path: Path) -> None:
    racing = [fork(language.prepare, tmp_path) for _ in range(3)]
    for process in racing:
        process.join(60)
        assert process.exitcode == 0
    (path,) = tmp_path.iterdir()
    assert path == language.prepare(tmp_path).path
    assert len(language.build(path, language.LanguageOptions()).batch("train", np.array([0, 5, 9]))[0]) == 3


def test_digits() -> None:
    task = vision.build(vision.prepare(Path("/nowhere")).path)
    images, labels = task.batch("train", np.arange(task.samples["train"]))
    assert images.shape == (1497, 1, 8, 8)
    assert float(images.min()) == 0
    assert float(images.max()) == 1
    assert np.bincount(labels.numpy()).min() > 100
    assert sum(task.samples.values()) == 1797


def test_the_cache_lies_next_to_the_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIGIL_CACHE")
    monkeypatch.setenv("VIGIL_RUN_DIR", "set")
    assert cache_dir(tmp_path / "runs" / "default" / "7-abcdef") == tmp_path / "runs" / ".cache"
    monkeypatch.delenv("VIGIL_RUN_DIR")
    assert cache_dir(tmp_path / "runs" / "by-hand") == tmp_path / "runs" / ".cache"


RECIPE = '''
"""Writes down what it is asked for."""
import json, os
from typing import Annotated
import torch
from training.data import Prepared, Task

def prepare(cache, identity=None):
    return Prepared(cache, "numbers")

def build(data, *, samples: Annotated[int, "1..", "How many there are."] = 50):
    torch.manual_seed(0)
    def batch(split, ids):
        with open(f"{os.environ['VIGIL_ATTEMPT_DIR']}/ids.{os.environ['RANK']}", "a") as file:
            print(json.dumps(ids.tolist()), file=file)
        return (torch.as_tensor(ids, dtype=torch.float32)[:, None] / samples,)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    loss = lambda model, batch: (model(batch[0]) - batch[0] ** 2).square().mean()
    return Task(model=model, samples={"train": samples, "validation": 10}, batch=batch, loss=loss,
                score=lambda model, batch: {"loss": loss(model, batch)})
'''

PARALLEL = '''
"""Adds gradients up after the backward pass, one by one."""
import contextlib
import torch.distributed as dist
from training.step import arithmetic

AXES = ("dp",)

def check(shape, **options):
    pass

def apply(model, mesh, *, scale: float = 1.0):
    model.scale = scale
    return model

no_sync = lambda model: contextlib.nullcontext()

def forward_backward(task, model, micro_batches, no_sync):
    loss = arithmetic.forward_backward(task, model, micro_batches, no_sync)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return loss
'''


@pytest.fixture
def added(tmp_path: Path) -> Path:
    for kind, name, text in (("recipes", "numbers", RECIPE), ("parallel", "by_hand", PARALLEL)):
        (tmp_path / "added" / kind).mkdir(parents=True)
        (tmp_path / "added" / kind / f"{name}.py").write_text(text)
    return tmp_path / "added"


NUMBERS = {key: value for key, value in TINY.items() if key != "language"} | {"recipe": "numbers", "micro_batch": 1}


@pytest.mark.slow
def test_a_single_file_adds_a_recipe_with_the_same_ids_on_any_world(added: Path, tmp_path: Path) -> None:
    requested = {}
    for world in (1, 2, 3, 4):
        run = Run(tmp_path / str(world), dict(NUMBERS), added=added)
        incarnation = run.finish(world)
        requested[world] = _requested_ids(incarnation.attempt_dir, world)
    assert len(requested[1]) == 12
    assert requested[1] == requested[2] == requested[3] == requested[4]
    run = Run(tmp_path / "shrinking", {**NUMBERS, "steps": 8}, added=added)
    before = _requested_ids(run.finish(3).attempt_dir, 3)
    run.write(steps=12)
    after = _requested_ids(run.finish(2, resume="step-8").attempt_dir, 2)
    assert before + after == requested[1]


@pytest.mark.slow
def test_a_single_file_adds_a_parallelism(added: Path, tmp_path: Path) -> None:
    ours = Run(tmp_path / "ours", dict(NUMBERS), added=added)
    ours.finish(2)
    theirs = Run(tmp_path / "theirs", {**NUMBERS, "parallelism": "by_hand", "by_hand": {"scale": 2}}, added=added)
    theirs.finish(2)
    assert theirs.series() == pytest.approx(ours.series(), rel=1e-6)
    assert theirs.checkpoints[-1].layout["parallelism"] == "by_hand"


def _requested_ids(attempt_dir: Path, world: int) -> list[list[int]]:
    """Return, by step, the ids that all ranks requested, in order, without each rank's discarded first micro-batch."""
    ranks = []
    for rank in range(world):
        lines = [json.loads(line) for line in (attempt_dir / f"ids.{rank}").read_text().splitlines()[1:]]
        size = Share(rank, world, 12, 1).size
        flat = [sample for line in lines for sample in line]
        ranks.append([flat[at : at + size] for at in range(0, len(flat), size)])
    return [[sample for part in step for sample in part] for step in zip(*ranks, strict=True)]


@pytest.mark.slow
def test_a_smaller_world_goes_on_with_the_same_state(tmp_path: Path) -> None:
    """2 ranks, then 1: the next losses are equal but for rounding. The micro-batch stays: it accumulates."""
    run = Run(tmp_path / "run", {**TINY, "language": {**TINY["language"], "dropout": 0.0}})
    run.finish(2)
    mean = {step: (loss + run.series(rank=1)[step]) / 2 for step, loss in run.series(rank=0).items()}
    run.finish(1, resume="step-8")
    assert run.series()[9] == pytest.approx(mean[9], rel=1e-6)
    assert run.series()[12] == pytest.approx(mean[12], rel=1e-4)
    assert run.checkpoints[-1].layout["micro_batch"] == 6
    assert run.checkpoints[-1].layout["axes"] == {"dp": 1}
