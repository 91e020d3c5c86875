"""Test one step's arithmetic: optimizer, learning rate, accumulation, imports."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.ranks import TINY, Run
from training.attempt.lineage import raise_generation
from training.config import run_config
from training.config.shape import Shape
from training.data import Task
from training.parallel import ddp
from training.step import compiled_code
from training.step.arithmetic import MicroBatch, forward_backward, learning_rate
from training.step.norms import GradientNorm
from training.step.optimizer import BETAS, AdamW

ROOT = Path(__file__).parents[2]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 1))


def test_adamw_equals_that_of_torch_bit_for_bit() -> None:
    ours, theirs = _model(), _model()
    optimizer = AdamW(ours.named_parameters(), weight_decay=0.1)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-3, betas=BETAS, eps=1e-8, fused=True)
    for step in range(20):
        batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        for model in (ours, theirs):
            model.zero_grad()
            model(batch).square().mean().backward()
        for group in reference.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        optimizer.step(1e-3 * (step + 1))
        reference.step()
    for item, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(item, other)


def test_a_parameter_without_gradient_is_an_error() -> None:
    model = _model()
    optimizer = AdamW(model.named_parameters(), weight_decay=0.1)
    with pytest.raises(RuntimeError, match="a parameter has no gradient"):
        optimizer.step(1e-3)


def test_accumulation_is_the_whole_batch() -> None:
    """Micro-batches of 3, 3 and 2 leave the gradient and the loss of all 8 at once."""
    samples = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    results = []
    for sizes in ([8], [3, 3, 2]):
        model = _model()
        task = Task(
            model=model,
            samples={"train": 8, "validation": 1},
            batch=lambda split, ids: (),
            loss=lambda model, batch: model(batch[0]).square().mean(),
            score=lambda model, batch: {},
        )
        parts = [
            MicroBatch((part,), weight=len(part) / 8, share=len(part) / 8, seed=0) for part in samples.split(sizes)
        ]
        loss = forward_backward(task, model, parts, ddp.no_sync)
        norm = GradientNorm(list(model.parameters()), Shape({}))()
        results.append((float(loss), float(norm), [p.grad for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)


def test_the_optimizer_divides_the_gradient_by_what_clips_it() -> None:
    clipped, plain = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    for parameter, gradient, divisor in ((clipped, 3.0, torch.tensor(4.0)), (plain, 0.75, None)):
        optimizer = AdamW([("p", parameter)], weight_decay=0.1)
        parameter.grad = torch.full((4,), gradient)
        assert float(GradientNorm([parameter], Shape({}))()) == 2 * gradient
        optimizer.step(1e-3, divisor, torch.zeros(()))
    assert torch.equal(clipped, plain)


def test_the_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    settings = run_config.parse(
        {"steps": 110, "warmup_steps": 10, "learning_rate": 1.0, "min_learning_rate_ratio": 0.2}
    )
    rates = [learning_rate(settings, step) for step in range(111)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(rates) == 1.0
    assert rates[60] == pytest.approx(0.6)
    assert rates[110] == pytest.approx(0.2)
    assert all(math.isfinite(learning_rate(run_config.parse({"steps": 1}), step)) for step in range(3))


PRINT_COMPILER_MODULES = "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules])"


@pytest.mark.slow
def test_training_imports_no_compiler(tmp_path: Path) -> None:
    """Importing torch._dynamo takes as long as importing torch; two ranks train, save and resume without it."""
    run = Run(tmp_path / "run", dict(TINY))
    run.finish(2)
    run.write(steps=14)
    attempt = run.job_dir / "attempt-9"
    (attempt / "spool").mkdir(parents=True)
    generation = raise_generation(run.job_dir, previous=None, resume="step-12")
    variables = {
        "VIGIL_RUN_DIR": str(run.folder), "VIGIL_ATTEMPT_DIR": str(attempt), "VIGIL_INCARNATION": "0",
        "VIGIL_GENERATION": str(generation), "VIGIL_RESUME": "step-12", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    # Not forked as other ranks of tests are: those have it.
    code = f"import sys; from training.__main__ import main; assert main(sys.argv[1:]) == 0; {PRINT_COMPILER_MODULES}"
    command = [sys.executable, "-c", code, str(run.folder / "portal" / "run.toml")]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_no_step_waits_for_sympy(tmp_path: Path) -> None:
    """Importing it is a third of a second a rank; a first checkpoint, written during the steps, may."""
    run = Run(tmp_path / "run", dict(TINY))
    run.write(steps=3)
    command = [sys.executable, "-X", "importtime", "-P", "-m", "training", str(run.folder / "portal" / "run.toml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "by-hand")],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=True,
    )  # fmt: skip
    before, starts, after = done.stdout.partition(" parameters, 1 rank on cpu, from scratch")
    assert starts
    assert "import time: " in before
    assert "completed at step 3" in after
    assert not [line for line in before.splitlines() if line.endswith(" sympy")]


class TestCompiledCode:
    """torch.compile runs what it finds in its cache."""

    @pytest.fixture(autouse=True)
    def _temporary(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")

    def cache_folder(self) -> Path:
        compiled_code.use_private_cache()
        return Path(os.environ.pop("TORCHINDUCTOR_CACHE_DIR"))

    def test_it_is_cached_for_the_next_run_where_nobody_else_can_write(self) -> None:
        place = self.cache_folder()
        assert place.stat().st_mode & 0o077 == 0
        assert self.cache_folder() == place

    def test_a_folder_that_others_prepared_is_not_used(self, tmp_path: Path) -> None:
        place = self.cache_folder()
        place.chmod(0o777)
        assert self.cache_folder() != place
        place.rmdir()
        (tmp_path / "theirs").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "theirs")
        assert self.cache_folder() != place
