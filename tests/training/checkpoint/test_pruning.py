"""Test that pruning spares pinned checkpoints at any time, and that a kill leaves nothing partial or unreported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from training import manifest
from training.checkpoint import pruning
from training.checkpoint.pruning import Retention
from training.engine.best import BestLosses
from training.manifest import Manifest


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    (tmp_path / "portal").mkdir()
    (tmp_path / "job" / "checkpoints").mkdir(parents=True)
    return tmp_path / "job"


def commit(job_dir: Path, name: str, step: int, generation: int = 1) -> Manifest:
    folder = job_dir / "checkpoints" / name
    folder.mkdir()
    created = Manifest(
        step=step, generation=generation, consumed_samples=0, world_size=1, layout={}, config_hash="", files=(),
        created=1.0,
    )  # fmt: skip
    (folder / "COMMITTED").write_text(created.dump())
    return manifest.check(folder)


def pin(job_dir: Path, *pins: object) -> None:
    (job_dir.parent / "portal" / "pinned.json").write_text(json.dumps({"pinned": pins}))


def there(job_dir: Path) -> list[str]:
    return sorted(path.name for path in (job_dir / "checkpoints").iterdir())


def test_a_pin_applies_to_a_single_checkpoint_whatever_its_folder_is_called(job_dir: Path) -> None:
    pin(job_dir, {"name": "step-4", "step": 4, "generation": 1})
    older, newer = commit(job_dir, "step-4.g1", 4, 1), commit(job_dir, "step-4", 4, 2)
    reports: list[Manifest] = []
    assert not pruning.prune(older, job_dir, report=reports.append)
    assert pruning.prune(newer, job_dir, report=reports.append)
    assert there(job_dir) == ["step-4.g1"]
    assert reports == [newer]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '"pinned"', "null", '{"pinned": null}', '{"pinned": {"step": 4}}', '{"pinned": [4, null, []]}',
        '{"pinned": [{"step": "4", "generation": 1}, {"step": true, "generation": true}, {"step": 4}]}',
        "[" * 100_000, "\udcff",
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_pins_nothing(job_dir: Path, text: str) -> None:
    path = job_dir.parent / "portal" / "pinned.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert pruning.pinned(job_dir) == frozenset()
    path.unlink()
    path.mkdir()
    assert pruning.pinned(job_dir) == frozenset()
    path.rmdir()
    path.parent.rmdir()
    assert pruning.pinned(job_dir) == frozenset(), "a run without a portal"


def test_what_is_sound_in_a_file_counts(job_dir: Path) -> None:
    pin(job_dir, {"step": 4}, {"name": "x", "step": 8, "generation": 2, "more": 1})
    assert pruning.pinned(job_dir) == {(8, 2)}


def test_what_is_pinned_in_the_middle_of_it_comes_back(job_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = commit(job_dir, "step-4", 4)
    rename = pruning.os.rename

    def renamed(source: Path, target: Path) -> None:
        rename(source, target)
        pin(job_dir, {"step": 4, "generation": 1})

    monkeypatch.setattr(pruning.os, "rename", renamed)
    reports: list[Manifest] = []
    assert not pruning.prune(found, job_dir, report=reports.append)
    assert there(job_dir) == ["step-4"]
    assert reports == []


def test_where_the_pins_cannot_be_read_nothing_goes(job_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = commit(job_dir, "step-4", 4)

    def fails(job_dir: Path) -> frozenset[tuple[int, int]]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(pruning, "pinned", fails)
    assert not pruning.prune(found, job_dir, report=lambda found: None)
    assert there(job_dir) == ["step-4"]


def test_what_a_kill_leaves_is_reported_or_restored(job_dir: Path) -> None:
    pin(job_dir, {"step": 4, "generation": 1})
    for step in (4, 8):
        commit(job_dir, f".pruned-step-{step}.g1.0a1b2c3d", step)
    (job_dir / "checkpoints" / ".pruned-step-12.0a1b2c3d").mkdir()  # its bytes had begun to go, so it was reported
    reports: list[Manifest] = []
    pruning.finish(job_dir, report=reports.append)
    assert there(job_dir) == ["step-4.g1"]
    assert [(found.name, found.identity) for found in reports] == [("step-8.g1", (8, 1))]


def test_pruning_is_reported_before_bytes_are_deleted(job_dir: Path) -> None:
    found = commit(job_dir, "step-4", 4)

    def check(found: Manifest) -> None:
        (left,) = there(job_dir)
        assert (job_dir / "checkpoints" / left / "COMMITTED").exists()

    assert pruning.prune(found, job_dir, report=check)
    assert there(job_dir) == []


def line(*steps: int, losses: dict[int, object] | None = None) -> list[Manifest]:
    parents = [None, *((step, 1) for step in steps)]
    return [
        Manifest(
            step=step, generation=1, parent=parent, consumed_samples=0, world_size=1, layout={}, config_hash="",
            files=(), created=1.0, state={"validation_loss": (losses or {}).get(step)},
        )
        for step, parent in zip(steps, parents, strict=False)
    ]  # fmt: skip


def retained(keep: Retention, checkpoints: list[Manifest]) -> list[int]:
    return sorted(step for step, _ in keep.select(checkpoints))


def test_the_newest_are_retained() -> None:
    assert retained(Retention(last=2), line(10, 20, 30)) == [20, 30]
    assert retained(Retention(last=5), line(10)) == [10]
    assert retained(Retention(), []) == []


def test_multiples_or_the_first_after_them_are_retained_for_good() -> None:
    assert retained(Retention(last=1, every=20), line(10, 20, 30, 40, 50)) == [20, 40, 50]
    assert retained(Retention(last=1, every=20), line(7, 15, 23, 31, 52, 53)) == [23, 52, 53]


def test_a_multiple_stays_when_those_before_it_are_gone() -> None:
    checkpoints = line(10, 20, 30, 40)
    assert retained(Retention(last=1, every=20), checkpoints[2:]) == [40]
    assert retained(Retention(last=1, every=20), checkpoints[1:]) == [20, 40]


def test_the_lowest_losses_are_retained() -> None:
    losses: dict[int, object] = {10: 3.0, 20: 1.0, 30: float("nan"), 40: 2.0, 50: "x"}
    assert retained(Retention(last=1, best=2), line(10, 20, 30, 40, 50, 60, losses=losses)) == [20, 40, 60]


def test_a_loss_enters_the_lowest_or_not() -> None:
    best = BestLosses(2)
    assert [best.add(loss) for loss in (3.0, 4.0, 5.0, float("nan"), 3.5, 1.0)] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    again = BestLosses(2)
    again.load_state_dict(best.state_dict())
    assert [again.add(loss) for loss in (3.5, 2.0)] == [False, True]
    again.load_state_dict({"losses": "x"})
    assert not BestLosses(0).add(1.0)


def test_a_loss_that_is_forgotten_gives_its_place_back() -> None:
    best = BestLosses(2)
    assert [best.add(loss) for loss in (3.0, 4.0, 2.0)] == [True] * 3
    best.forget(2.0)
    assert [best.add(loss) for loss in (5.0, 3.5)] == [False, True], "of 3.0 and 4.0"
    best.forget(7.0)
    assert not best.add(3.7)
