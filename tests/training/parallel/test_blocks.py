"""Test options of blocks: recomputation changes no bit, lower precision changes little, and each setting runs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.training.parallel import pool
from tests.training.ranks import TINY, Run
from training.config import layout_checks
from training.config.run_config import parse
from training.engine import blocks
from training.models.llama import Llama
from training.models.llama_sizes import PRESETS
from training.recipes import language

MODEL = {"layers": 2, "heads": 2, "head_width": 16, "context": 16, "dropout": 0.2}
CONFIG: dict[str, Any] = {**TINY, "steps": 8, "checkpoint_every": 0, "language": MODEL}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process in float32."""
    return losses(tmp_path_factory.mktemp("plain"))


def losses(folder: Path, **settings: Any) -> dict[int, float]:
    run = Run(folder / "run", {**CONFIG, **settings})
    run.finish(1)
    found = run.series()
    assert len(found) == CONFIG["steps"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputing_changes_no_bit(how: str, plain: dict[int, float], tmp_path: Path) -> None:
    assert losses(tmp_path, recompute=how) == plain, "dropout included"


@pytest.mark.slow
def test_nor_where_ranks_have_parts_of_the_context(tmp_path: Path) -> None:
    table = {**CONFIG, "steps": 3, "mesh": {"cp": 2}}
    runs = {how: Run(tmp_path / how, {**table, "recompute": how}) for how in ("none", "selective", "full")}
    pool.finish(list(runs.values()), 2, tmp_path / "ranks")
    for rank in range(2):
        plain, *others = (run.series(rank=rank) for run in runs.values())
        assert len(plain) == 3
        assert others == [plain, plain]


@pytest.mark.slow
@pytest.mark.parametrize("determinism", ["scientific", "fast"])
def test_each_level_of_determinism_runs(determinism: str, plain: dict[int, float], tmp_path: Path) -> None:
    """Data, weights and dropout are the same at all of them; on a CPU the sums are, too, but for their order."""
    assert losses(tmp_path, determinism=determinism) == pytest.approx(plain, abs=1e-5)


@pytest.mark.slow
def test_offloading_is_the_same_run(plain: dict[int, float], tmp_path: Path) -> None:
    offloaded = losses(tmp_path, parallelism="fsdp", fsdp={"offload": True})
    assert offloaded == pytest.approx(plain, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_stays_near(dtype: str, plain: dict[int, float], tmp_path: Path) -> None:
    found = losses(tmp_path, dtype=dtype)
    assert found == pytest.approx(plain, abs=0.05)
    assert found != plain


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_fp8_learns_as_bf16_does(scaling: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    whole = losses(tmp_path / "bf16", dtype="bf16")
    found = losses(tmp_path / "fp8", dtype="fp8", fp8_scaling=scaling)
    assert found == pytest.approx(whole, abs=0.1)
    assert found != whole


@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_blocks_give_the_same(plain: dict[int, float], tmp_path: Path) -> None:
    found = losses(tmp_path, compile=True, language={**MODEL, "dropout": 0.0})
    expected = losses(tmp_path / "without", language={**MODEL, "dropout": 0.0})
    assert found == pytest.approx(expected, abs=1e-5)
    assert expected != plain


@pytest.mark.filterwarnings("ignore")  # torchao's, on being imported
def test_in_fp8_head_and_embedding_stay_as_they_are() -> None:
    pytest.importorskip("torchao")
    with torch.device("meta"):
        model = Llama(language.dims(layers=2, heads=2, head_width=16))
    config = parse({"recipe": "language", "dtype": "fp8"})
    with warnings.catch_warnings():
        blocks.to_fp8(model, config, torch.device("cpu"))
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["blocks.0.attention.query"] == kinds["blocks.1.mlp.down"] == "Float8Linear"
    assert kinds["head"] == "Linear"
    assert kinds["tokens"] == "Embedding"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_gpu_takes_fp8_products_over_any_number_of_tokens(
    samples: int, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao")
    multiply, products = torch._scaled_mm, 0

    def multiply_as_on_a_gpu(*args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Check the sizes as a GPU does, by its stand-in; a CPU accepts any."""
        nonlocal products
        products += 1
        with FakeTensorMode():
            left, right = (torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda") for a in args)
            whole = torch.empty((), device="cuda")
            multiply(left, right, scale_a=whole, scale_b=whole, out_dtype=torch.bfloat16)
        return multiply(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", multiply_as_on_a_gpu)
    monkeypatch.setattr(blocks, "_multiplies_fp8", lambda device: True)
    dims = language.dims(layers=1, heads=2, head_width=16, context=24)
    model = Llama(dims)
    config = parse({"recipe": "language", "dtype": "fp8", "fp8_scaling": scaling})
    blocks.to_fp8(model, config, torch.device("cpu"), tokens=dims.context)
    for parameter in model.bfloat16().parameters():
        nn.init.normal_(parameter)
    model(torch.zeros(samples, dims.context, dtype=torch.int64)).sum().backward()
    assert products == 3 * 7, "forward, a gradient of what comes in and one of the weight, of each matrix"


WITH_BYTES = {"1m": 1.0, "10m": 10.8}
WITH_32000 = {"125m": 134, "350m": 374, "1b": 1104, "3b": 3015, "7b": 6738}
"""Millions of parameters, embeddings included."""


def test_presets_have_as_many_parameters_as_they_are_called() -> None:
    for table, vocabulary in ((WITH_BYTES, 256), (WITH_32000, 32_000)):
        for preset, millions in table.items():
            dims = language.dims(preset=preset, vocabulary=vocabulary)
            assert dims.parameters / 1e6 == pytest.approx(millions, rel=0.02)
            number, unit = float(preset[:-1]), preset[-1]
            assert dims.parameters / {"m": 1e6, "b": 1e9}[unit] == pytest.approx(number, rel=0.15)
    assert {"tiny", *WITH_BYTES, *WITH_32000} == set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_has_its_stated_size_and_passes_its_checks(preset: str) -> None:
    table = {"recipe": "language", "language": {"preset": preset}}
    assert not list(layout_checks.check(parse(table), 1))
    assert not list(layout_checks.check(parse({**table, "parallelism": "fsdp", "mesh": {"tp": 2}}), 8))
    dims = language.dims(preset=preset)
    with torch.device("meta"):
        model = Llama(dims)
    assert sum(parameter.numel() for parameter in model.parameters()) == dims.parameters
