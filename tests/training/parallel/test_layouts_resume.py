"""Test resuming: on the same layout, the same losses bit for bit; on another one, the same weights and first loss."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.examples import EXHAUSTIVE
from tests.training.digesting import digests
from tests.training.parallel import pool
from tests.training.ranks import TINY, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # all runs of a class are in one fixture

IS_SOAK = "TEST_COMBINATIONS" in os.environ
EVERY = 4 if EXHAUSTIVE else 2  # steps from one checkpoint to the next
STEPS, SAVED = 3 * EVERY, 2 * EVERY
MODEL = {"layers": 4, "heads": 4, "kv_heads": 2, "head_width": 8, "context": 16}
CONFIG: dict[str, Any] = {**TINY, "global_batch": 16, "steps": STEPS, "checkpoint_every": EVERY, "language": MODEL}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (4, {}),
    "ddp of 2": (2, {}),
    "zero1": (4, {"parallelism": "zero1"}),
    "fsdp": (4, {"parallelism": "fsdp"}),
    "fsdp of 2": (2, {"parallelism": "fsdp"}),
    "hsdp": (4, {"parallelism": "fsdp", "mesh": {"dp": 2, "shard": 2}}),
    "tp": (2, {"mesh": {"tp": 2}}),
    "pp": (2, {"mesh": {"pp": 2}}),
    "zbv": (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "ZBVZeroBubble"}}),
    "cp": (2, {"mesh": {"cp": 2}}),
    "fsdp and tp": (4, {"parallelism": "fsdp", "mesh": {"tp": 2}}),
    "pp and fsdp": (4, {"parallelism": "fsdp", "mesh": {"pp": 2}}),
    "pp and zero1": (4, {"parallelism": "zero1", "mesh": {"pp": 2}}),
    "four axes": (16, {"parallelism": "fsdp", "mesh": {"pp": 2, "dp": 2, "shard": 2, "tp": 2}}),
}
WITH_DROPOUT = {"language": {**MODEL, "dropout": 0.2}}
SPY = "tests.training.digesting:install"
# What is read at every landing first: each layout is written and read once. The rest is for `make test-all`.
READ_BY: dict[str, tuple[list[str], list[str]]] = {
    "ddp": (["zero1"], ["one", "fsdp of 2"]),
    "fsdp": (["pp"], ["fsdp of 2", "one"]),
    "tp": (["one", "ddp of 2"], []),
    "fsdp and tp": (["tp", "pp and fsdp"], ["fsdp", "one", "zero1"]),
    "pp and fsdp": (["fsdp and tp", "zbv"], ["one"]),
    "zero1": (["fsdp of 2"], ["zero1", "ddp of 2"]),
    "pp and zero1": (["fsdp"], ["one"]),
    **({"four axes": (["one", "fsdp", "pp and zero1"], [])} if IS_SOAK else {}),
}
Done = tuple[Run, Path]
"""A run, and the folder of its last attempt."""


def finish_all(requested: dict[str, tuple[str, Run]], folder: Path, *, resume: str = "") -> dict[str, Done]:
    """Run them by name (layout, run): all of one world size on the same ranks."""
    by_world: dict[int, list[str]] = defaultdict(list)
    for name, (layout, _) in requested.items():
        by_world[LAYOUTS[layout][0]].append(name)
    done: dict[str, Done] = {}
    for world, names in by_world.items():
        runs = [requested[name][1] for name in names]
        folders = pool.finish(runs, world, folder / f"world-{world}", resume=resume, spy=SPY)
        done |= dict(zip(names, zip(runs, folders, strict=True), strict=True))
    return done


def copy_of(run: Run, folder: Path, layout: str, **changes: Any) -> Run:
    """Copy the job folder up to step SAVED, for a run on another layout."""
    created = Run(folder, {**CONFIG, **LAYOUTS[layout][1], **changes})
    shutil.copytree(run.job_dir, created.job_dir, dirs_exist_ok=True)
    shutil.rmtree(created.job_dir / "checkpoints" / f"step-{STEPS}", ignore_errors=True)
    created.attempts = run.attempts
    return created


# At every landing each axis and each way to share; in `make test-all` also what those in two axes contain.
SAME_LAYOUTS = [
    *("ddp", "zero1", "hsdp", "tp", "zbv", "cp", "fsdp and tp", "pp and zero1", *["four axes"] * IS_SOAK),
    *(pytest.param(layout, marks=pytest.mark.exhaustive) for layout in ("fsdp", "pp", "pp and fsdp")),
]


def params_of(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the parameters of every test of this class that is to run."""
    return [item.callspec.params for item in request.session.items if getattr(item, "cls", None) is request.cls]


@pytest.fixture(scope="class")
def same_layout(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Done, Done]]:
    """Return, by layout, the run to its end, and the same resumed at step SAVED."""
    folder, names = tmp_path_factory.mktemp("same"), [item["layout"] for item in params_of(request)]
    requested = {name: (name, Run(folder / name, {**CONFIG, **LAYOUTS[name][1], **WITH_DROPOUT})) for name in names}
    whole = finish_all(requested, folder / "whole")
    again = {name: (name, copy_of(whole[name][0], folder / f"{name} again", name, **WITH_DROPOUT)) for name in names}
    resumed = finish_all(again, folder / "again", resume=f"step-{SAVED}")
    return {name: (whole[name], resumed[name]) for name in names}


class TestOnTheSameLayout:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("layout", SAME_LAYOUTS)
    def test_hex_equal(self, layout: str, same_layout: dict[str, tuple[Done, Done]]) -> None:
        (whole, whole_dir), (resumed, resumed_dir) = same_layout[layout]
        assert resumed.events("run.started")[0]["resumed_from"] == f"step-{SAVED}"
        for rank in range(LAYOUTS[layout][0]):
            for name in ("loss", "gradient_norm"):
                found, expected = resumed.series(name, rank), whole.series(name, rank)
                assert {step: value.hex() for step, value in found.items()} == {
                    step: value.hex() for step, value in expected.items()
                }
        assert digests(resumed_dir, "ended") == digests(whole_dir, "ended")


Others = tuple[dict[str, Done], dict[str, Done], dict[str, Done]]


@pytest.fixture(scope="class")
def others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Others:
    """Return what was written up to SAVED, that continued, and that read and continued by other layouts."""
    folder = tmp_path_factory.mktemp("others")
    wanted = [(item["written"], item["read"]) for item in params_of(request)]
    names = dict.fromkeys(name for name, _ in wanted)
    requested = {name: (name, Run(folder / name, {**CONFIG, **LAYOUTS[name][1], "steps": SAVED})) for name in names}
    written = finish_all(requested, folder / "written")
    on = {name: (name, copy_of(written[name][0], folder / f"{name} on", name, steps=SAVED + 1)) for name in names}
    went_on = finish_all(on, folder / "went on", resume=f"step-{SAVED}")
    reading = {
        created: (layout, copy_of(written[name][0], folder / created, layout, steps=SAVED + 1))
        for name, layout in wanted
        for created in [f"{name} > {layout}"]
    }
    return written, went_on, finish_all(reading, folder / "read", resume=f"step-{SAVED}")


def pairs() -> Iterator[Any]:
    for name, (always, rest) in READ_BY.items():
        yield from (pytest.param(name, layout) for layout in always)
        yield from (pytest.param(name, layout, marks=pytest.mark.exhaustive) for layout in rest)


class TestOnAnotherLayout:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(("written", "read"), list(pairs()))
    def test_the_same_run(self, written: str, read: str, others: Others) -> None:
        """The state of step SAVED is read unchanged, and the next loss is that of an uninterrupted run."""
        wrote, went_on, reads = others
        run, attempt_dir = reads[f"{written} > {read}"]
        assert digests(attempt_dir, "restored") == digests(wrote[written][1], "ended")
        assert _loss(run, read) == pytest.approx(_loss(went_on[written][0], written), rel=1e-6)


def _loss(run: Run, layout: str) -> float:
    return fmean(run.series(rank=rank)[SAVED + 1] for rank in range(LAYOUTS[layout][0]))
