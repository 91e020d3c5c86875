"""Test that a step leaves work to the device: no waiting, no extra operations, no recompilation."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.training.ranks import TINY, Run
from training.config.shape import Shape
from training.data import Task
from training.recipes import language, vision
from training.step.clipping import GradientGuard
from training.step.loss_scale import LossScale
from training.step.norms import GradientNorm
from training.step.optimizer import AdamW

STEPS = 8
WITHOUT_FLUSH = {"steps": STEPS, "checkpoint_every": 0, "flush_steps": 1000, "flush_seconds": 60}


class _Crossings(TorchDispatchMode):
    """Records operations that copy between devices, for which the host waits on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        given = tree_leaves((args, kwargs or {}))
        out = function(*args, **(kwargs or {}))
        devices = {item.device.type for item in [*given, *tree_leaves(out)] if isinstance(item, torch.Tensor)}
        if len(devices) > 1:
            self.found[str(function)] += 1
        return out


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("armed", [False, True])
def test_what_decides_on_a_step_stays_on_the_gpu(scaled: bool, armed: bool) -> None:
    """A GPU that only seems to be there: reading a number from it raises, and so does mixing devices."""
    gpu = torch.device("cuda", 0)
    with FakeTensorMode(), _Crossings() as crossings:
        shapes = {"matrix": (8, 4), "gain": (4,)}
        named = [(name, nn.Parameter(torch.empty(shape, device=gpu))) for name, shape in shapes.items()]
        optimizer = AdamW(named, weight_decay=0.1)
        norm = GradientNorm(optimizer.parameters, Shape({}))
        scale = LossScale(gpu) if scaled else None
        guard = GradientGuard(gpu, clip=1.0, armed=armed, scale=scale)
        crossings.found.clear()
        for _ in range(2):
            for parameter in optimizer.parameters:
                parameter.grad = torch.ones_like(parameter)
            guarded = guard(norm())
            optimizer.step(1e-3, guarded.divisor, guarded.skipped)
            optimizer.zero_grad()
        assert {value.device for value in guarded} == {gpu}
    assert crossings.operations > 50
    assert not crossings.found


class _Softmaxes(TorchDispatchMode):
    """Records the precision in which a loss is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._log_softmax.default:
            self.kinds.add(args[0].dtype)
        return function(*args, **(kwargs or {}))


def _texts(folder: Path) -> Task:
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"{number} " * 40)
    return language.build(
        language.prepare(folder / "cache", source=str(folder)).path, language.LanguageOptions(context=8)
    )


def _digits(folder: Path) -> Task:
    return vision.build(vision.prepare(folder).path)


@pytest.mark.parametrize(("task", "logits"), [(_texts, (2, 8, 256)), (_digits, (2, 10))], ids=["language", "vision"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_losses_are_normalised_in_full_precision(
    device: str, dtype: torch.dtype, task: Callable[[Path], Task], logits: tuple[int, ...], tmp_path: Path
) -> None:
    """Autocast does that of itself on a CPU only."""
    created = task(tmp_path)
    batch = created.batch("train", np.arange(2))
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)  # torch.autocast turns itself off where there is no GPU
    torch.set_autocast_dtype(device, dtype)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Softmaxes() as softmaxes:
            there = tuple(torch.empty_like(tensor, device=device) for tensor in batch)
            for reckon in (created.loss, created.score):
                softmaxes.kinds.clear()
                reckon(lambda inputs: torch.empty(logits, dtype=dtype, device=device), there)
                assert softmaxes.kinds == {torch.float32}
    finally:
        torch.set_autocast_dtype(device, before)
        torch.set_autocast_enabled(device, False)


class _Reads(TorchDispatchMode):
    """Records numbers that the host reads from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def watch_steps() -> None:
    """Record, step by step, how many numbers were read and how many operations there were."""
    from training.trainer import Trainer

    run_step, between = Trainer._run_step, Trainer._between_steps
    whole = Counter[str]()
    for name in ("tolist", "cpu", "numpy"):  # no operations where all is main memory
        _count(name, whole)

    def watched(trainer: Trainer) -> Any:
        whole.clear()
        with _Reads() as reads:
            agreed = run_step(trainer)
            between(trainer, agreed)
        with open(trainer.workspace.attempt_dir / "reads", "a") as file:
            print(json.dumps([reads.count + whole.total(), reads.operations]), file=file)
        return agreed

    Trainer._run_step = watched  # type: ignore[method-assign]
    Trainer._between_steps = lambda trainer, agreed: False  # type: ignore[method-assign]


def _count(name: str, calls: Counter[str]) -> None:
    """Calls of a method, but for what ranks agree on: those flags are integers, and the host's on any device."""
    method = getattr(torch.Tensor, name)

    def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        calls[name] += tensor.is_floating_point()
        return method(tensor, *arguments, **options)

    setattr(torch.Tensor, name, counted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_between_two_reports_no_step_waits_for_its_numbers(dtype: str, tmp_path: Path) -> None:
    run = Run(
        tmp_path / "run", {**TINY, **WITHOUT_FLUSH, "dtype": dtype, "micro_batch": 6}, spy=f"{__name__}:watch_steps"
    )
    incarnation = run.finish(1)
    lines = (incarnation.attempt_dir / "reads").read_text().splitlines()
    reads, operations = zip(*map(json.loads, lines), strict=True)
    assert len(reads) == STEPS
    assert min(operations) > 100
    assert reads[0] > 0, "the first step's numbers are reported at once, so this would have found any"
    assert set(reads[1:]) == {0}


def count_compilations() -> None:
    """Compile without generating code, and record what was compiled by when, and what could not be."""
    from torch._dynamo.utils import counters

    from training.trainer import Trainer

    compile_, run_step = torch.compile, Trainer._run_step
    torch.compile = lambda *given, **more: compile_(*given, **more, backend="aot_eager")

    def counted(trainer: Trainer) -> Any:
        agreed = run_step(trainer)
        payload = {"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}
        with open(trainer.workspace.attempt_dir / "compiled", "a") as file:
            print(json.dumps(payload), file=file)
        return agreed

    Trainer._run_step = counted  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_blocks_and_loss_are_compiled_once_for_all(recompute: str, tmp_path: Path) -> None:
    settings = {"compile": True, "dtype": "bf16", "recompute": recompute, "micro_batch": 6, "validate_every": 3}
    run = Run(tmp_path / "run", {**TINY, **WITHOUT_FLUSH, **settings}, spy=f"{__name__}:count_compilations")
    run.write(language={**TINY["language"], "layers": 10})  # dynamo gives up at the ninth of the same code
    incarnation = run.finish(1)
    reports = [json.loads(line) for line in (incarnation.attempt_dir / "compiled").read_text().splitlines()]
    assert len(reports) == STEPS
    assert not any(item["breaks"] for item in reports)
    assert [item["graphs"] for item in reports] == [2, 2, 2, 3, 3, 3, 3, 3], "a block, the loss; a block of validations"


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"ddp": {"bucket_mib": 0.1}}, {"parallelism": "fsdp"}, {"mesh": {"cp": 2}}],
    ids=["ddp", "fsdp", "cp"],
)
def test_what_is_compiled_gives_the_same_on_several_ranks(layout: dict[str, Any], tmp_path: Path) -> None:
    model = {**TINY["language"], "dropout": 0.0}
    settings = {**TINY, **WITHOUT_FLUSH, **layout, "language": model, "micro_batch": 3, "steps": 4}
    plain = Run(tmp_path / "plain", settings)
    plain.finish(2)
    compiled = Run(tmp_path / "compiled", {**settings, "compile": True}, spy=f"{__name__}:count_compilations")
    compiled.finish(2)
    assert len(plain.series()) == 4
    assert compiled.series() == pytest.approx(plain.series(), abs=1e-5)


@pytest.mark.slow
def test_the_origin_of_a_nan_is_found_in_compiled_blocks(tmp_path: Path) -> None:
    settings = {"compile": True, "validate_every": 0, "micro_batch": 6}
    run = Run(tmp_path / "run", {**TINY, **WITHOUT_FLUSH, **settings, "flush_steps": 1}, spy=f"{__name__}:plant_a_nan")
    incarnation = run.start(1)
    assert incarnation.wait() == [1], incarnation.output()
    (event,) = run.events("guard.nonfinite")
    assert event["where"] == "the output of blocks.1.mlp.up"


def plant_a_nan() -> None:
    from training.trainer import Trainer

    count_compilations()
    run_step = Trainer._run_step

    def planted(trainer: Trainer) -> Any:
        if trainer.step == 2:
            with torch.no_grad():
                trainer.assembly.model.state()["blocks.1.mlp.up.weight"][0, 0] = float("nan")
        return run_step(trainer)

    Trainer._run_step = planted  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_compiler_that_comes_later_knows_of_bitwise() -> None:
    """Its import is put off (docs/decisions/0006); what was requested before must count all the same."""
    script = (
        "from training.step.determinism import set_determinism; set_determinism({!r}); "
        "import sys; assert 'torch._inductor' not in sys.modules; "
        "import torch._inductor.config as config; print(config.deterministic)"
    )
    with warnings.catch_warnings():
        for level, expected in (("bitwise", "True"), ("fast", "False")):
            command = [sys.executable, "-c", script.format(level)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
            assert done.stdout.split() == [expected]


@pytest.mark.slow
def test_only_a_fast_run_rounds_its_products() -> None:
    """Convolutions count, too: torch rounds them to TF32 by default."""
    script = (
        "import torch; from training.step.determinism import set_determinism\n"
        "for level in ('bitwise', 'fast', 'scientific'):\n"
        "    set_determinism(level)\n"
        "    print(torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["False highest", "True high", "False highest"]
