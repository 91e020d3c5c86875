"""Test which axes `auto` picks and why, and that the memory estimate is what a rank really takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.parallel import peaks
from tests.training.ranks import TINY, Run, fork
from tests.training.weights import origins
from training import commands
from training.config.base import ConfigError
from training.config.run_config import parse
from training.models.llama_sizes import llama_dims
from training.planning.checking import problems
from training.planning.footprint import MemoryFootprint
from training.planning.layouts import Ranks
from training.planning.plan import plan
from training.units import GIB

# In bf16 (whole), which processors without such products emulate, a case takes as long as all others together.
MODEL = {"layers": 6, "heads": 8, "kv_heads": 4, "head_width": 32, "hidden": 704, "context": 192}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "table"),
    [
        (1, {}),
        (1, {"recompute": "full"}),
        pytest.param(1, {"recompute": "selective", "dtype": "bf16"}, marks=pytest.mark.exhaustive),
        (1, {"micro_batch": 2}),
        (2, {"communication": "topk"}),
        (2, {"communication": "diloco"}),
        (2, {"parallelism": "fsdp"}),
        pytest.param(2, {"parallelism": "fsdp", "dtype": "bf16"}, marks=pytest.mark.exhaustive),
        (2, {"mesh": {"tp": 2}}),
        (2, {"mesh": {"cp": 2}}),
        (2, {"mesh": {"pp": 2}}),
        (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "GPipe"}}),
        (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "ZBVZeroBubble"}}),
    ],
    ids=str,
)
@pytest.mark.sampled(3)
def test_the_estimate_is_near_what_is_measured(world: int, table: dict[str, Any], tmp_path: Path) -> None:
    """Within a tenth; of several ranks a sixth, for what is gathered lives until a thread of gloo's lets it go."""
    ranks = [
        fork(peaks.measure, tmp_path, {"global_batch": 8, "language": MODEL, **table}, world, rank)
        for rank in range(world)
    ]
    for process in ranks:
        process.join(120)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    most = max(rank["measured"] for rank in reports)
    assert reports[0]["estimated"] == pytest.approx(most, rel=1 / 10 if world == 1 else 1 / 6)


@pytest.mark.parametrize(
    ("preset", "ranks", "more", "parallelism", "mesh", "because"),
    [
        ("tiny", Ranks(2, 2, 8 * GIB), {}, "ddp", {}, "a copy on each rank (ddp): yes"),
        ("1b", Ranks(8, 8, 80 * GIB), {}, "ddp", {}, "yes"),
        ("7b", Ranks(8, 8, 80 * GIB), {}, "fsdp", {}, "GiB of 64.0 GiB usable"),
        ("7b", Ranks(64, 8, 80 * GIB), {}, "fsdp", {"dp": 8, "shard": 8}, "shards within a node, copies across"),
        ("7b", Ranks(16, 8, 47 * GIB), {}, "fsdp", {}, "copies across (fsdp, dp × shard): no"),
        ("7b", Ranks(8, 8, 32 * GIB), {}, "fsdp", {"tp": 4}, "matrices split over 4 ranks of a node"),
        ("7b", Ranks(8, 8, 80 * GIB), {"mesh": {"tp": 2}}, "fsdp", {"tp": 2}, "shards across all ranks with tp"),
        ("7b", Ranks(16, 2, 16 * GIB), {"recompute": "full"}, "fsdp", {}, "shards across all ranks (fsdp): yes"),
        ("7b", Ranks(8, 8, None), {}, "ddp", {}, "a rank's memory is unknown"),
    ],
)
def test_auto_takes_the_first_way_that_fits(
    preset: str, ranks: Ranks, more: dict[str, Any], parallelism: str, mesh: dict[str, int], because: str
) -> None:
    options = {"parallelism": "auto", "dtype": "bf16", "global_batch": 128, "language": {"preset": preset}, **more}
    found = plan(parse(options), ranks)
    assert found.config.parallelism == parallelism
    assert found.config.mesh == mesh
    assert because in "\n".join(found.why)
    assert not list(problems(found.config, ranks.world_size))


def test_given_axes_stay_whatever_is_tried() -> None:
    options = {"parallelism": "auto", "global_batch": 32, "mesh": {"dp": 2}}
    with pytest.raises(ConfigError) as refused:
        plan(parse(options), Ranks(4, 4, 1_000_000))
    assert "dp 2 × tp 4 = 8 does not divide 4 ranks" in str(refused.value)
    options = {"parallelism": "auto", "global_batch": 32, "mesh": {"tp": 2}}
    with pytest.raises(ConfigError) as refused:
        plan(parse(options), Ranks(4, 4, 1_000_000))
    assert str(refused.value).count("(fsdp)") == 1, "nothing is tried twice"


@pytest.mark.parametrize(
    "given",
    [
        {"mesh": {"dp": 2}, "communication": "diloco"},
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "GPipe"}},
    ],
    ids=["replicas", "stages"],
)
def test_what_only_copies_can_do_is_tried_with_axes_that_are_given(given: dict[str, Any]) -> None:
    found = plan(parse({"parallelism": "auto", "global_batch": 8, **given}), Ranks(2, 2, 8 * GIB))
    assert (found.config.parallelism, found.config.mesh) == ("ddp", given["mesh"])


@pytest.mark.parametrize(
    ("table", "field", "words"),
    [
        ({"steps": 20, "warmup_steps": 20}, "warmup_steps", "is not less than steps"),
        ({"language": {"heads": 8, "kv_heads": 3}}, "language", "does not divide 8 heads"),
        ({"language": {"lora_rank": 4}}, "language.lora_rank", "Name them in from_weights"),
    ],
)
def test_what_no_layout_would_fix_is_reported_by_its_field(table: dict[str, Any], field: str, words: str) -> None:
    (problem,) = problems(parse({"parallelism": "auto", **table}), 2)
    assert problem.field == field
    assert words in problem.message


def test_auto_splits_no_vocabulary_that_does_not_divide() -> None:
    """It is read from the data only when the run starts; then what fits the memory must fit the model, too."""
    language = {"preset": "7b", "tokenizer": "/data/tokenizer.json"}
    request = parse({"parallelism": "auto", "dtype": "bf16", "global_batch": 128, "language": language})
    split = plan(request, Ranks(8, 8, 32 * GIB), llama_dims(preset="7b", vocabulary=32_000))
    assert split.config.mesh == {"tp": 4}
    with pytest.raises(ConfigError, match="language.vocabulary: is 32001, which does not divide by mesh.tp, 4"):
        plan(request, Ranks(8, 8, 32 * GIB), llama_dims(preset="7b", vocabulary=32_001))


def test_tensor_parallelism_never_leaves_the_node() -> None:
    for per_node in (1, 2, 4, 8):
        for memory in (12, 24, 48):
            request = parse({"parallelism": "auto", "dtype": "bf16", "global_batch": 64, "language": {"preset": "7b"}})
            try:
                found = plan(request, Ranks(32, per_node, memory * GIB))
            except ConfigError:
                continue
            assert per_node % found.shape["tp"] == 0


def test_a_plan_that_does_not_fit_lists_what_was_tried() -> None:
    request = parse({"parallelism": "auto", "global_batch": 8, "language": {"preset": "7b"}})
    with pytest.raises(ConfigError) as refused:
        plan(request, Ranks(1, 1, 8 * GIB))
    (problem,) = refused.value.problems
    assert problem.field == "run.parallelism"
    assert "a copy on each rank (ddp): no" in problem.message
    assert '[run.fsdp] offload = true and recompute = "full" and dtype = "bf16"' in problem.message
    assert "96.5 GiB of main memory" in problem.message
    assert "ranks with 125 GiB" in problem.message


def test_auto_is_let_through_where_some_way_works() -> None:
    assert not list(problems(parse({"parallelism": "auto", "global_batch": 8, "fsdp": {"reshard": "never"}}), 4))
    (problem,) = problems(parse({"parallelism": "auto", "global_batch": 7}), 5)
    assert problem.field == "global_batch"
    text = (
        "7 does not divide over 5 ranks. Nearest that do: 5 or 10. This would work: global_batch = 5 (ddp, dp 5, micro"
    )
    assert problem.message.startswith(text)


def test_the_estimate_is_of_the_type_that_fsdp_multiplies_in() -> None:
    def estimate(**more: Any) -> MemoryFootprint | None:
        options = {"parallelism": "fsdp", "global_batch": 64, "language": {"preset": "1b"}, **more}
        return plan(parse(options), Ranks(8, 8, 80 * GIB)).footprint

    assert estimate(fsdp={"dtype": "bf16"}) == estimate(dtype="bf16")
    assert estimate(fsdp={"dtype": "fp32"}, dtype="bf16") == estimate()


def test_what_was_tried_is_listed_with_the_field_that_failed() -> None:
    (problem,) = problems(parse({"parallelism": "auto", "communication": "powersgd", "dtype": "fp16"}), 2)
    assert '(ddp): no, dtype: is "fp16", and powersgd combines' in problem.message


def test_auto_takes_uneven_shares_where_ranks_are_lacking() -> None:
    """Fixed layouts do the same: 7 samples over 5 ranks, and no rank without one."""
    request = parse({"parallelism": "auto", "global_batch": 7})
    assert not list(problems(request, 5, allow_uneven=True))
    found = plan(request, Ranks(5, 5, 8 * GIB, allow_uneven=True))
    assert (found.config.parallelism, found.config.micro_batch) == ("ddp", 2), "the largest share at once"
    assert not list(problems(found.config, 5, allow_uneven=True))
    (problem,) = problems(parse({"parallelism": "auto", "global_batch": 3}), 5, allow_uneven=True)
    assert "3 samples leave nothing to do for some of 5 ranks" in problem.message
    fixed = parse({"global_batch": 7, "mesh": {"pp": 2}, "parallelism": "fsdp"})
    (problem,) = problems(fixed, 4, allow_uneven=True)
    assert problem.field == "global_batch", "a pipeline's ranks all need as many micro-batches"


@pytest.mark.slow
def test_auto_runs(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {**TINY, "parallelism": "auto", "global_batch": 9, "steps": 3})
    run.finish(3)
    (chosen,) = run.events("plan.chosen")
    assert (chosen["parallelism"], chosen["mesh"]) == ("ddp", {"dp": 3})
    assert run.checkpoints[-1].layout["parallelism"] == "ddp"
    run.write(steps=5)
    run.finish(2, resume="step-3")  # one was lost: 9 samples are 4 and 5
    (chosen,) = run.events("plan.chosen")
    assert chosen["mesh"] == {"dp": 2}
    assert run.checkpoints[-1].step == 5


def test_the_command_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'name = "x"\n[resources]\nnodes = "4:8"\ngpus_per_node = 8\n'
        '[run]\nparallelism = "auto"\ndtype = "bf16"\nglobal_batch = 256\n[run.language]\npreset = "7b"\n'
    )
    assert commands.run("plan", [str(spec), "--gpu-memory", "80"]) == 0
    output = capsys.readouterr().out
    assert "fsdp on 64 ranks: dp 8 × shard 8" in output
    assert "from --gpu-memory" in output
    assert "a rank, at its peak: 63.1 GiB at once, of weights 3.0 GiB" in output
    assert commands.run("plan", [str(spec), "--gpu-memory", "80", "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["mesh"] == {"dp": 8, "shard": 8}
    assert payload["bytes_per_rank"]["total"] > 0
    assert commands.run("plan", [str(spec), "--gpu-memory", "1"]) == 2
    assert "auto found no layout" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--ranks", "0"], ["--ranks-per-node", "-1"], ["--gpu-memory", "-3"]], ids=str)
def test_the_command_takes_no_nonsense(wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.run("plan", [str(tmp_path / "run.toml"), *wrong])
    assert ended.value.code == 2
    assert f"argument {wrong[0]}: is {wrong[1]}. Write a" in capsys.readouterr().err


def test_recomputing_is_not_suggested_where_it_would_not_help() -> None:
    request = parse({"parallelism": "auto", "global_batch": 512, "language": {"preset": "1m"}})
    with pytest.raises(ConfigError, match="512 does not divide over 7 ranks") as caught:
        plan(request, Ranks(7, 7, 80 * GIB))
    assert "recompute" not in str(caught.value)


def test_initial_weights_give_the_sizes_where_they_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, spec = tmp_path / "llama", tmp_path / "run.toml"
    spec.write_text(f'[run]\nparallelism = "auto"\n[run.language]\nfrom_weights = "{folder}"\n')
    requests = [str(spec), "--gpu-memory", "80"]
    assert commands.run("plan", requests) == 0
    assert f"{folder}, which determines the model's sizes, is not on this machine" in capsys.readouterr().out
    origins.write(folder)
    assert commands.run("plan", requests) == 0
    assert "at its peak" in capsys.readouterr().out
    (folder / "config.json").unlink()
    assert commands.run("plan", requests) == 2
    assert "run.language.from_weights: " in capsys.readouterr().err
