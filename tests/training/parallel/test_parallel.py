"""Test that each of training.config.combinations gives the losses of one process, and that no others are accepted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.examples import EXHAUSTIVE
from tests.training.parallel import pool
from tests.training.ranks import TINY, Run
from training.config import combinations, layout_checks
from training.config.combinations import COMBINATIONS, SCHEDULES, Combination
from training.config.run_config import parse

STEPS = 10 if EXHAUSTIVE else 4
MODEL = {"layers": 4, "heads": 4, "kv_heads": 2, "head_width": 8, "context": 16}
CONFIG: dict[str, Any] = {**TINY, "global_batch": 16, "steps": STEPS, "checkpoint_every": 0, "language": MODEL}


IS_SOAK = "TEST_COMBINATIONS" in os.environ
FEW = ("1F1B", "ZBVZeroBubble")
THREE_AXES = ({"pp", "shard", "tp"}, "1F1B")


def cases(world: int) -> Iterator[Any]:
    """Return the layouts on two ranks an axis: up to four, and the plain 3-D one; in `make soak` on up to 32.

    A landing runs each row once, with the schedules taken in turn, so that all of them come up; `test-all` runs all.
    """
    turns = itertools.count()
    for row in COMBINATIONS:
        turn = SCHEDULES[next(turns) % len(SCHEDULES)] if row.schedules == SCHEDULES else "1F1B"
        if 2 ** len(row.axes) != world:
            continue
        for schedule in _schedules(row, turn) if "pp" in row.axes else (None,):
            if IS_SOAK or world < 8 or (row.axes, schedule) == THREE_AXES:
                is_enough = world == 8 or schedule in (None, turn)
                name = f"{row} {schedule}" if schedule else str(row)
                yield pytest.param(row, schedule, id=name, marks=() if is_enough else pytest.mark.exhaustive)


def _schedules(row: Combination, turn: str) -> Iterable[str]:
    """Return all schedules with fsdp's axis, and in a soak on up to eight ranks; else a plain one and another."""
    has_all = row.axes <= {"pp", "shard"} or (IS_SOAK and len(row.axes) < 4)
    wanted = row.schedules if has_all else {*FEW, turn if len(row.axes) < 3 else ""}
    return [schedule for schedule in row.schedules if schedule in wanted]


def config_of(row: Combination, schedule: str | None = None) -> dict[str, Any]:
    """Return two ranks along each axis, and one along the others: as a sweep over them writes it."""
    mesh = {axis: 2 if axis in row.axes else 1 for axis in ("pp", "cp", "tp")}
    if row.parallelism == "fsdp":
        mesh |= {axis: 2 if axis in row.axes else 1 for axis in ("dp", "shard")}
    pipeline = {"pipeline": {"schedule": schedule}} if schedule else {}
    return {**CONFIG, "parallelism": row.parallelism, "mesh": mesh, **pipeline}


Runs = dict[tuple[Combination, str | None], Run]
ALONE = (COMBINATIONS[0], None)


@pytest.fixture(scope="class")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the requested runs of this class, all on the same ranks, and one process alone to compare with."""
    folder = tmp_path_factory.mktemp("cases")
    requests = [item.callspec.params for item in request.session.items if getattr(item, "cls", None) is request.cls]
    cases = [(entry["row"], entry["schedule"]) for entry in requests]
    if request.cls.WORLD == 1:
        return _finish(dict.fromkeys([ALONE, *cases]), 1, folder)
    return _finish({ALONE}, 1, folder) | _finish(dict.fromkeys(cases), request.cls.WORLD, folder)


def _finish(cases: Iterable[tuple[Combination, str | None]], world: int, folder: Path) -> Runs:
    runs = {case: Run(folder / f"{world}-{number}", config_of(*case)) for number, case in enumerate(cases)}
    pool.finish(list(runs.values()), world, folder / f"world-{world}")
    return runs


def losses(run: Run, world: int) -> dict[int, float]:
    """Return losses of the whole batch: ranks that share samples report the same, so it is the mean over all ranks."""
    ranks = [run.series(rank=rank) for rank in range(world)]
    return {step: fmean(report[step] for report in ranks) for step in ranks[0]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if world := getattr(metafunc.cls, "WORLD", 0):
        metafunc.parametrize(("row", "schedule"), list(cases(world)))


class LikeSingleProcess:
    """A class for each number of ranks: workers of xdist share out the tests by classes, and these take their time."""

    WORLD: int
    pytestmark = pytest.mark.timeout(
        1800
    )  # all cases of a class run in the first one's fixture; pool.SECONDS ends them

    @pytest.mark.slow
    @pytest.mark.sampled(2)
    def test_the_losses_equal_those_of_a_single_process(
        self, row: Combination, schedule: str | None, ran: Runs
    ) -> None:
        run, alone = ran[row, schedule], ran[ALONE]
        found, expected = losses(run, self.WORLD), losses(alone, 1)
        assert len(found) == STEPS
        assert found == pytest.approx(expected, abs=1e-5)
        assert run.series("gradient_norm") == pytest.approx(alone.series("gradient_norm"), rel=1e-4)
        if row.axes <= {"dp"} and row.parallelism != "fsdp":  # the same sums, in the same order but for the mean of two
            assert found == pytest.approx(expected, abs=1e-6)


class TestSingleRank(LikeSingleProcess):
    WORLD = 1


class TestTwoRanks(LikeSingleProcess):
    WORLD = 2


class TestFourRanks(LikeSingleProcess):
    WORLD = 4


class TestEightRanks(LikeSingleProcess):
    WORLD = 8


if IS_SOAK:

    class TestSixteenRanks(LikeSingleProcess):
        WORLD = 16

    class TestThirtyTwoRanks(LikeSingleProcess):
        WORLD = 32


@pytest.mark.parametrize("row", COMBINATIONS, ids=str)
def test_what_is_listed_is_let_through(row: Combination) -> None:
    for schedule in row.schedules or (None,):
        assert not list(layout_checks.check(parse(config_of(row, schedule)), 2 ** len(row.axes)))


@pytest.mark.parametrize(
    ("table", "world", "field", "words"),
    [
        ({"parallelism": "zero1", "mesh": {"tp": 2}}, 2, "parallelism", 'zero1 × tp cannot be combined. Write "fsdp"'),
        ({"mesh": {"tp": 2}}, 4, "parallelism", 'ddp × dp × tp cannot be combined. Write "fsdp"'),
        (
            {"mesh": {"pp": 2}, "pipeline": {"schedule": "ZBVZeroBubble"}},
            4,
            "parallelism",
            'works with 1F1B only, not ZBVZeroBubble. Write "fsdp", which supports it.',
        ),
        (
            {"parallelism": "fsdp", "mesh": {"tp": 3}, "global_batch": 36},
            12,
            "mesh.tp",
            "heads, 4, does not divide by 3. Nearest that do: 2 or 4",
        ),
        (
            {"mesh": {"tp": 8}, "language": {"heads": 12}},
            8,
            "mesh.tp",
            "12, does not divide by 8. The nearest that does: 4",
        ),
        (
            {"mesh": {"tp": 4}, "language": {"heads": 6, "kv_heads": 2}},
            4,
            "mesh.tp",
            "heads, 6, does not divide by 4. The nearest that does: 2.",
        ),
        ({"mesh": {"tp": 2, "pp": 3}}, 4, "mesh.pp", "does not divide 4 ranks. The nearest that does: 2"),
        ({"mesh": {"pp": 4}, "language": {"layers": 3}}, 4, "mesh.pp", "the model has 3. At most: 2"),
        ({"mesh": {"cp": 9}}, 18, "mesh.cp", "does not fall into 2 × 9 chunks. The nearest that does: 6."),
        ({"mesh": {"cp": 2}, "language": {"context": 97}}, 2, "mesh.cp", "2 × 2 chunks. The nearest that does: 1."),
        ({"mesh": {"shard": 2}}, 2, "mesh.shard", 'is not an axis of ddp. Write parallelism = "fsdp"'),
        ({"mesh": {"dp": 2}}, 4, "mesh.dp", "Write 4, or leave it out"),
        ({"mesh": {"dp": 1, "tp": 2}}, 4, "mesh.dp", "Write 2, or leave it out: it takes what is left over."),
        ({"mesh": {"dp": 2, "tp": 4}}, 2, "mesh.tp", "dp 2 × tp 4 = 8 does not divide 2 ranks. Write 1."),
        ({"global_batch": 7}, 2, "global_batch", "7 does not divide over 2 ranks. Nearest that do: 6 or 8"),
        ({"mesh": {"pp": 2}, "global_batch": 1}, 2, "global_batch", "1F1B on 2 ranks needs at least 2"),
        ({"mesh": {"pp": 2}, "language": {"tied": True}}, 2, "language.tied", "different ranks"),
        ({"language": {"heads": 4, "kv_heads": 3}}, 1, "language", "Take one of [1, 2, 4]"),
        ({"recipe": "vision", "mesh": {"tp": 2}}, 2, "mesh.tp", "Leave the axis out"),
        ({"dtype": "fp8", "mesh": {"tp": 2}}, 2, "dtype", 'Write "bf16"'),
        ({"parallelism": "fsdp", "fsdp": {"dtype": "fp16"}}, 2, "fsdp.dtype", "vanish without the loss scale"),
        ({"compile": True, "mesh": {"tp": 2}}, 2, "compile", "split matrices"),
        (
            {"compile": True, "mesh": {"pp": 2}, "pipeline": {"schedule": "ZBVZeroBubble"}},
            2,
            "compile",
            "runs the backward pass in two halves",
        ),
        (
            {"recompute": "selective", "mesh": {"pp": 2}, "pipeline": {"schedule": "DualPipeV"}},
            2,
            "recompute",
            'only "full" can recompute',
        ),
        (
            {
                "parallelism": "fsdp",
                "mesh": {"pp": 2},
                "pipeline": {"schedule": "DualPipeV"},
                "fsdp": {"reshard": "always"},
            },
            4,
            "fsdp.reshard",
            'must stay. Write "auto"',
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_nearest_that_can(
    table: dict[str, Any], world: int, field: str, words: str
) -> None:
    (problem,) = layout_checks.check(parse(table), world)
    assert problem.field == field
    assert words in problem.message


def test_fewer_samples_than_pipelines_are_refused_as_any_uneven_batch() -> None:
    uneven, few = layout_checks.check(parse({"mesh": {"pp": 2}, "global_batch": 1}), 4)
    assert (uneven.field, few.field) == ("global_batch", "global_batch")
    assert "1 does not divide over 2 data-parallel coordinates" in uneven.message


def test_the_documented_table_is_the_code_s() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "parallelism.md").read_text()
    assert "\n".join(combinations.table()) in page
    assert all(schedule in page for schedule in SCHEDULES)
