"""Test LoRA: adapters train next to frozen weights, on any number of ranks, and are stored alone in checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.ranks import TINY, Run
from tests.training.weights import origins
from tests.training.weights.test_from_weights import model_of
from training.__main__ import main
from training.checkpoint import storage
from training.config import layout_checks
from training.config.run_config import parse
from training.weights.base import BaseWeights
from training.weights.llama import sizes_of
from training.weights.weight_files import open_weights

LORA = {"from_weights": "/data/llama", "lora_rank": 4}


@pytest.mark.parametrize(
    ("table", "world", "field", "words"),
    [
        ({"language": {"lora_rank": 4}}, 1, "language.lora_rank", "Name them in from_weights"),
        ({"language": {**LORA, "lora_targets": "query keys"}}, 1, "language.lora_targets", '"keys" is not a matrix'),
        ({"language": {**LORA, "lora_targets": " "}}, 1, "language.lora_targets", "is empty"),
        ({"language": LORA, "parallelism": "zero1"}, 2, "parallelism", 'Write "ddp" or "fsdp"'),
        ({"language": LORA, "mesh": {"tp": 2}}, 2, "mesh.tp", "is not supported with adapters"),
        ({"language": LORA, "mesh": {"pp": 2}}, 2, "mesh.pp", "is not supported with adapters"),
        ({"language": LORA, "communication": "powersgd"}, 2, "communication", 'Write "plain"'),
        ({"language": LORA, "dtype": "fp8"}, 1, "dtype", 'Write "bf16"'),
    ],
)
def test_what_has_not_been_tried_is_refused_by_name(table: dict[str, Any], world: int, field: str, words: str) -> None:
    (problem,) = layout_checks.check(parse(table), world)
    assert problem.field == field
    assert words in problem.message


def table(folder: Path, **lora: Any) -> dict[str, Any]:
    options = {"from_weights": str(folder), "context": 16, **lora}
    return {**TINY, "steps": 6, "checkpoint_every": 3, "language": options}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Return the weights, and a run of a single process with adapters for them."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("lora")
    weights = origins.write(folder / "llama", files=2)
    run = Run(folder / "run", table(weights, lora_rank=4, lora_targets="query, value, down"))
    run.finish(1)
    return weights, run


@pytest.mark.slow
def test_it_begins_at_the_weights_and_learns(trained: tuple[Path, Run], tmp_path: Path) -> None:
    weights, run = trained
    whole = Run(tmp_path / "whole", table(weights))
    whole.finish(1)
    assert run.series()[1] == whole.series()[1], "B is zero: the first loss is the weights' own, bit for bit"
    assert run.series()[2] != whole.series()[2]
    assert run.series()[6] < run.series()[1]


@pytest.mark.slow
def test_a_checkpoint_holds_adapters_alone_and_resumes(trained: tuple[Path, Run], tmp_path: Path) -> None:
    weights, run = trained
    folder = run.job_dir / "checkpoints" / "step-3"
    stored = storage.stored_tensors(folder)
    assert {name for name in stored if name.startswith("model.") and "lora_" not in name} == set()
    assert len([name for name in stored if name.startswith("model.")]) == 2 * 3 * 2, "A and B of three in two blocks"
    again = copy_of(run, tmp_path / "run")
    copied = again.folder
    expected = run.series()
    options = dict(again.config["language"])
    moved = weights.rename(weights.with_name("moved"))  # the run has what it needs
    try:
        again.finish(1, resume="step-3")
    finally:
        moved.rename(weights)
    assert again.series() == expected
    assert again.config["language"] == options

    part = next((copied / "job" / "base").glob("model-*"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert again.start(1, resume="step-3").wait() == [1]
    (failed,) = again.events("run.failed")
    assert "step-3 can't be resumed from" in failed["error"]
    assert "is not what was copied there" in failed["error"]


def copy_of(run: Run, folder: Path) -> Run:
    again = Run.__new__(Run)
    again.__dict__ |= {**run.__dict__, "folder": shutil.copytree(run.folder, folder)}
    return again


@pytest.mark.slow
def test_a_fresh_start_has_the_stored_weights(trained: tuple[Path, Run], tmp_path: Path) -> None:
    """Their sizes, too: a run may well end before its first checkpoint."""
    weights, run = trained
    again = copy_of(run, tmp_path / "run")
    moved = weights.rename(weights.with_name("moved"))
    origins.write(weights, config={"rope_theta": 10_000.0})
    try:
        again.finish(1)
    finally:
        shutil.rmtree(weights)
        moved.rename(weights)
    assert again.series() == run.series()
    config = json.loads((again.job_dir / "checkpoints" / "step-6" / "COMMITTED").read_text())["config"]
    assert config["language"]["rope_base"] == origins.CONFIG["rope_theta"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"parallelism": "fsdp"}, {"parallelism": "ddp"}, {"parallelism": "auto", "recompute": "full"}],
    ids=["fsdp", "ddp", "auto, recomputed"],
)
@pytest.mark.sampled(3)
def test_two_ranks_give_the_losses_of_a_single_rank(
    layout: dict[str, Any], trained: tuple[Path, Run], tmp_path: Path
) -> None:
    weights, run = trained
    both = Run(tmp_path / "both", {**run.config, **layout})
    both.finish(2)
    losses = [both.series(rank=rank) for rank in range(2)]
    assert {step: (losses[0][step] + losses[1][step]) / 2 for step in losses[0]} == pytest.approx(
        run.series(), abs=1e-6
    )
    assert both.series("gradient_norm") == pytest.approx(run.series("gradient_norm"), rel=1e-4)
    listed = json.loads((both.job_dir / "base" / "BASE").read_text())["files"]
    assert {entry["file"] for entry in listed} >= {"config.json", "model.safetensors.index.json"}


@pytest.mark.slow
def test_a_bit_that_flips_in_what_is_not_trained_is_found(trained: tuple[Path, Run], tmp_path: Path) -> None:
    _, run = trained
    both = Run(tmp_path / "both", {**run.config, "parallelism": "ddp", "check_weights_every": 2})
    both.spy = f"{__name__}:flip_a_bit"
    assert set(both.start(2).wait()) == {1}
    (corruption,) = both.events("guard.corruption")
    assert (corruption["step"], corruption["check"], corruption["ranks"]) == (4, "replica", [])
    assert corruption["what"] == "model.blocks.1.mlp.up.weight"


def flip_a_bit() -> None:
    """Flip a bit on rank 1, in frozen weights, after step 3."""
    from training.engine.optimizer_step import OptimizerStep

    step = OptimizerStep.__call__

    def flips(self: OptimizerStep, parts: Any, finished: int) -> Any:
        found = step(self, parts, finished)
        if finished == 3 and os.environ["RANK"] == "1":
            model = self._assembly.model.parts[0]
            model.get_parameter("blocks.1.mlp.up.weight").detach().view(torch.int32)[0, 0] ^= 1
        return found

    OptimizerStep.__call__ = flips  # type: ignore[method-assign]


def test_weights_are_stored_whatever_their_file_is_called(tmp_path: Path) -> None:
    weights = origins.write(tmp_path / "llama")
    (weights / "model.safetensors").rename(weights / "modèle (1).safetensors")
    (tmp_path / "job").mkdir()
    base = BaseWeights(tmp_path / "job")
    base.copy(weights)
    base.verify()
    base.load_state_dict(base.state_dict())


@pytest.mark.parametrize("name", ["tuned", "tuned.bin", ".tuned.safetensors"])
def test_an_export_is_stored_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    """It was named as a file, and is found in a folder from then on."""
    export = origins.write_export(tmp_path / name)
    (tmp_path / "job").mkdir()
    base = BaseWeights(tmp_path / "job")
    base.copy(export)
    base.verify()
    assert sizes_of(open_weights(base.path)) == sizes_of(open_weights(export))


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_nothing_of_a_copy_that_was_cut_short_is_read(first: int, then: int, tmp_path: Path) -> None:
    """The weights were saved again meanwhile, in another number of files."""

    def die() -> None:
        raise KeyboardInterrupt

    weights = origins.write(tmp_path / "llama", files=first)
    (tmp_path / "job").mkdir()
    base = BaseWeights(tmp_path / "job")
    with pytest.raises(KeyboardInterrupt):
        base.copy(weights, die)
    shutil.rmtree(weights)
    origins.write(weights, files=then, dtype=torch.bfloat16)
    base.copy(weights)
    found = open_weights(base.path)
    assert {name: found.read(name).dtype for name in found.tensors} == dict.fromkeys(origins.tensors(), torch.bfloat16)
    assert {path.name for path in base.path.iterdir()} == {path.name for path in weights.iterdir()} | {"BASE"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's use of transformers
def test_peft_and_the_merged_weights_give_the_same(
    trained: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    from peft import PeftModel

    weights, run = trained
    checkpoint = str(run.job_dir / "checkpoints" / "step-6")
    folder, merged = tmp_path / "adapter", tmp_path / "merged.safetensors"
    assert main(["export", checkpoint, str(folder)]) == 0
    assert main(["export", checkpoint, "--merged", str(merged)]) == 0
    assert {path.name for path in folder.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}

    base = transformers.LlamaForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        untrained = base(tokens).logits
        tuned = PeftModel.from_pretrained(base, folder)
        expected = tuned(tokens).logits
        found = model_of(merged)(tokens)
        whole = tmp_path / "whole"
        assert main(["export", checkpoint, "--hf", str(whole), "--merged", "--shard-gb", "0.00002"]) == 0
        theirs = tuned.merge_and_unload().state_dict()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(whole).state_dict()
    assert loaded.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=1e-6, atol=1e-7)
    assert (expected - untrained).abs().max() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    for target in (folder, merged):
        assert main(["export", checkpoint, str(target), *(["--merged"] if target is merged else [])]) == 1
        assert "exists" in capsys.readouterr().err
    alone = shutil.copytree(checkpoint, tmp_path / "elsewhere" / "step-6")
    assert main(["export", str(alone), str(tmp_path / "other"), "--merged"]) == 1
    assert "the weights that its adapters belong to, is not there or damaged" in capsys.readouterr().err
