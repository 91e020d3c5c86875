"""Test the advice of a plan in which nothing fits: each remedy is planned as a person would write it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.parallel import advice
from training.config.base import ConfigError
from training.config.run_config import parse
from training.planning.layouts import USABLE, LayoutPlan, Ranks
from training.planning.plan import plan
from training.units import GIB

LLAMA_70B = {
    **{"layers": 80, "heads": 64, "kv_heads": 8, "head_width": 128, "hidden": 28672},
    **{"context": 131_072, "vocabulary": 128_256},
}


@pytest.mark.parametrize(
    ("table", "ranks", "words"),
    [
        (
            {"dtype": "bf16", "language": LLAMA_70B},
            Ranks(64, 8, 80 * GIB),
            'work: recompute = "full" (fsdp, shard 4 × cp 16',
        ),
        ({"dtype": "bf16", "language": LLAMA_70B}, Ranks(8, 8, 80 * GIB), "; 32 such ranks and"),
        ({"language": {"preset": "7b"}}, Ranks(1, 1, 80 * GIB), "[run.fsdp] offload = true (fsdp, shard 1"),
        ({"dtype": "bf16", "language": {"preset": "7b"}}, Ranks(2, 2, 80 * GIB), 'work: recompute = "selective" ('),
        (
            {"dtype": "bf16", "micro_batch": 8, "language": {"preset": "7b"}},
            Ranks(8, 8, 80 * GIB),
            "work: micro_batch = 2",
        ),
        (
            {"dtype": "bf16", "recompute": "full", "language": {"preset": "3b", "context": 131_072}},
            Ranks(1, 1, 80 * GIB),
            "context = ",
        ),
        ({"language": {"preset": "1b"}}, Ranks(2, 2, 2 * GIB, on_cpu=True), "16 such ranks and"),
        ({"dtype": "bf16", "mesh": {"tp": 2}, "language": {"preset": "7b"}}, Ranks(2, 2, 60 * GIB), "offload = true"),
    ],
    ids=["recompute", "ranks", "offload", "selective", "micro-batch", "context", "CPUs", "mesh"],
)
def test_every_remedy_works_as_written(table: dict[str, Any], ranks: Ranks, words: str) -> None:
    table = {"parallelism": "auto", "global_batch": 64, **table}
    with pytest.raises(ConfigError) as refused:
        plan(parse(table), ranks)
    (problem,) = refused.value.problems
    assert words in problem.message
    assert "offload" not in problem.message or not ranks.on_cpu, "its memory is main memory already"
    assert "layouts need at least" in problem.message or problem.message.count(": no,") <= 3, "nobody reads 24 refusals"
    assert advice.remedies(problem.message)
    for remedy in advice.remedies(problem.message):
        changed, others = advice.applied(remedy, table, ranks)
        found = plan(parse(changed), others)
        assert found.footprint is not None
        assert f"{found.footprint.total / GIB:.1f} GiB a rank" in remedy


def test_a_fixed_layout_that_does_not_fit_gets_another_that_does() -> None:
    options = {"dtype": "bf16", "global_batch": 64, "language": {"preset": "7b"}}
    found = plan(parse(options), Ranks(8, 8, 80 * GIB))
    verdict, remedy = found.why
    assert "does not fit" in verdict
    assert remedy.startswith('This would work: parallelism = "auto" (fsdp, shard 8')
    sharded = plan(parse({**options, "parallelism": "fsdp"}), Ranks(8, 8, 80 * GIB))
    assert sharded.why[1].startswith("This would work: micro_batch = 2 (fsdp, shard 8, micro-batch 2, 63.1 GiB")


def test_what_was_requested_is_never_changed_silently() -> None:
    """Auto changes the mesh and the micro-batch only: the rest costs time or changes numbers, and is suggested."""
    for memory in (16, 24, 48, 80):
        for world in (1, 8, 64):
            request = parse({"parallelism": "auto", "dtype": "bf16", "global_batch": 64, "language": {"preset": "7b"}})
            try:
                found = plan(request, Ranks(world, min(8, world), memory * GIB))
            except ConfigError:
                continue
            settled = {"parallelism", "mesh", "micro_batch", "fsdp", "ddp", "tensor", "context", "pipeline"}
            assert _without(found.config.model_dump(), settled) == _without(request.model_dump(), settled)
            assert not found.config.options_of("fsdp").get("offload")


@pytest.mark.parametrize(
    ("language", "ranks", "mesh"),
    [
        ({"preset": "7b", "context": 16_384}, Ranks(8, 8, 56 * GIB), {"tp": 8}),
        ({"preset": "7b", "context": 32_768}, Ranks(16, 1, 80 * GIB), {"cp": 16}),
        ({"preset": "7b"}, Ranks(64, 8, 44 * GIB), {"dp": 4, "shard": 16}),
    ],
    ids=str,
)
def test_contexts_are_split_and_shards_reach_over_nodes(
    language: dict[str, Any], ranks: Ranks, mesh: dict[str, int]
) -> None:
    table = {"parallelism": "auto", "dtype": "bf16", "global_batch": 64, "language": language}
    assert _fitting(table, ranks).config.mesh == mesh


def test_memory_is_not_mentioned_where_it_is_not_short() -> None:
    table = {"parallelism": "auto", "global_batch": 8, "communication": "powersgd", "dtype": "fp16"}
    with pytest.raises(ConfigError, match='This would work: dtype = "bf16"') as refused:
        plan(parse(table), Ranks(2, 2, 80 * GIB))
    assert "GiB" not in str(refused.value).partition("would work")[0]


def test_what_no_single_setting_fixes_gets_two() -> None:
    with pytest.raises(ConfigError, match=r"This would work: global_batch = 4096 and no \[run.mesh\] \(ddp, dp 4096"):
        plan(parse({"parallelism": "auto", "global_batch": 4099, "mesh": {"pp": 7}}), Ranks(4096, 8, 80 * GIB))


def _without(table: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in names}


def _fitting(table: dict[str, Any], ranks: Ranks) -> LayoutPlan:
    found = plan(parse(table), ranks)
    assert found.footprint is not None
    assert ranks.memory_bytes is not None
    assert found.footprint.total <= USABLE * ranks.memory_bytes
    return found
