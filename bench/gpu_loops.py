"""Run our trainer and a bare loop of the same model for bench.gpu, in windows of steps, and profile them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from training.attempt import workspace
from training.attempt.heartbeat import Heartbeat
from training.attempt.stopping import StopRequest
from training.config import run_config
from training.config.dims import Dims
from training.corpus.shards import Shard, ShardIndex
from training.corpus.tokenizer import TokenizerId
from training.loader.order import Loader
from training.loop import LoopServices
from training.metrics import flops
from training.metrics.step_trace import merge_spans, silence_kineto, total_length
from training.models.llama import Llama
from training.reporting.reporter import NullReporter, Reporter
from training.runtime.distributed import World
from training.step import arithmetic
from training.step.determinism import set_determinism
from training.step.optimizer import BETAS, EPSILON, has_decay
from training.trainer import Trainer

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Size:
    """A model, and how much goes through it."""

    name: str
    model: Mapping[str, Any]
    """Options of the recipe."""
    micro_batch: int
    global_batch: int
    window: int
    """Steps that are measured at once."""
    vocabulary: int = 32_768
    """A multiple of 128, as fast heads want it."""
    compile: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)

    def but(self, **settings: Any) -> Size:
        more = {**self.settings, **settings}
        return Size(
            self.name,
            self.model,
            self.micro_batch,
            self.global_batch,
            self.window,
            self.vocabulary,
            self.compile,
            more,
        )

    def run(self, data: Path) -> run_config.RunConfig:
        return run_config.parse(
            {
                "recipe": "language",
                "steps": 100_000,
                "warmup_steps": 10,
                "global_batch": self.global_batch,
                "micro_batch": self.micro_batch,
                "dtype": "bf16",
                "compile": self.compile,
                "determinism": "fast",
                "validate_every": 0,
                "checkpoint_every": 0,
                "sample_seconds": 0,
                **self.settings,
                "language": {**self.model, "source": str(data)},
            }
        )


def write_data(folder: Path, vocabulary: int, tokens: int) -> Path:
    """Token shards of nothing, but for some tokens being likelier than others: losses have somewhere to fall."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    shards = []
    for split, count in (("train", tokens), ("validation", tokens // 20)):
        drawn = (generator.random(count) ** 4 * vocabulary).astype(np.uint16)
        drawn.tofile(folder / f"{split}-00000.bin")
        digest = hashlib.sha256(drawn.tobytes()).hexdigest()
        shards.append([Shard(f"{split}-00000.bin", count, digest)])
    named = TokenizerId("nothing", hashlib.sha256(b"nothing").hexdigest(), vocabulary, 0)
    train, validation = shards
    ShardIndex(named, "uint16", train, validation).write(folder)
    return folder


class Ours:
    """The trainer as it is, its steps one after the other."""

    def __init__(self, size: Size, data: Path, folder: Path, world: World, *, telemetry: bool = True) -> None:
        """`telemetry`: reports, heartbeat and metrics as by default; otherwise nothing is told and hardly fetched."""
        self.size, self.device = size, world.device
        more = {} if telemetry else {"flush_seconds": 60.0, "flush_steps": 10_000, "sample_seconds": 0}
        self.config = size.but(**more).run(data)
        self.determinism = self.config.determinism
        set_determinism(self.determinism)
        where = workspace.create_standalone(folder)
        self.reporter: _RecordingReporter | _LossRecorder = (
            _LossRecorder() if not telemetry else _RecordingReporter(where.attempt_dir, rank=0, incarnation=0)
        )
        heartbeat = Heartbeat.open(where.attempt_dir, rank=0, incarnation=0)
        stop = StopRequest()
        stop.watch(where.attempt_dir)
        self.trainer = Trainer(self.config, where, world, LoopServices(self.reporter, heartbeat, stop))
        self.trainer.checkpoints.start_from(None)
        with _quiet():
            self.trainer._prepare(None)

    @property
    def dims(self) -> Dims:
        found = self.trainer.assembly.task.dims
        assert found is not None
        return found

    @property
    def tokens_per_step(self) -> int:
        return self.trainer.assembly.units_per_step

    @property
    def loss(self) -> float:
        return self.reporter.loss

    def steps(self, count: int) -> None:
        set_determinism(self.determinism)  # it is the process's
        with _quiet():
            for _ in range(count):
                self.trainer._between_steps(self.trainer._run_step())
            self.trainer.meter.flush()

    def state(self) -> dict[str, Tensor]:
        return self.trainer.assembly.model.state()

    def close(self) -> None:
        self.trainer.assembly.feed.close()
        self.reporter.close()


class Bare:
    """The shortest loop that somebody who wants speed would write in plain torch: the whole model compiled, autocast,
    fused AdamW, nothing fetched. The same weights and samples as ours."""

    def __init__(self, ours: Ours) -> None:
        self._ours, self.size, self.device = ours, ours.size, ours.device
        with torch.device("meta"):
            model = Llama(ours.dims)
        model.to_empty(device=self.device)
        model.load_state_dict({name: tensor.detach().clone() for name, tensor in ours.state().items()})
        places = torch.arange(ours.dims.context, device=self.device)
        model.positions = lambda device: places
        self.model = model
        self._run = torch.compile(model) if self.size.compile else model
        matrices = [parameter for parameter in model.parameters() if has_decay(parameter)]
        gains = [parameter for parameter in model.parameters() if not has_decay(parameter)]
        decay = ours.config.weight_decay
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": decay}, {"params": gains, "weight_decay": 0.0}],
            betas=BETAS,
            eps=EPSILON,
            fused=True,
        )
        self._loader = Loader(ours.trainer.assembly.order, ours.trainer.assembly.share)
        self._done = 0
        self._last: Tensor | None = None

    @property
    def loss(self) -> float:
        return float("nan") if self._last is None else float(self._last)

    def prepare(self, count: int) -> list[Batches]:
        """The next steps' samples, in page-locked memory."""
        return [self._batches(self._done + index) for index in range(count)]

    def _batches(self, step: int) -> Batches:
        task = self._ours.trainer.assembly.task
        found = []
        for ids in self._loader.ids(step * self.size.global_batch):
            tokens, targets = (tensor.contiguous() for tensor in task.batch("train", ids))
            found.append((tokens.pin_memory(), targets.pin_memory()) if self._on_gpu else (tokens, targets))
        return found

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def run(self, prepared: list[Batches]) -> None:
        parameters = list(self.model.parameters())
        for batches in prepared:
            for group in self._optimizer.param_groups:
                group["lr"] = arithmetic.learning_rate(self._ours.config, self._done)
            total: Tensor | None = None
            for tokens, targets in batches:
                inputs = tokens.to(self.device, non_blocking=True)
                wanted = targets.to(self.device, non_blocking=True)
                with torch.autocast(self.device.type, torch.bfloat16):
                    loss = functional.cross_entropy(self._run(inputs).flatten(0, 1).float(), wanted.flatten())
                (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
                part = loss.detach() / len(batches)
                total = part if total is None else total + part
            nn.utils.clip_grad_norm_(parameters, self._ours.config.clip, foreach=True)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._done += 1
            self._last = total

    def steps(self, count: int) -> None:
        self.run(self.prepare(count))


Loop = Ours | Bare


def timed(loop: Loop, count: int) -> float:
    """Seconds of so many steps, from an idle device to an idle device."""
    run = _ready(loop, count)
    wait(loop.device)
    began = time.perf_counter()
    run()
    wait(loop.device)
    return time.perf_counter() - began


def _ready(loop: Loop, count: int) -> Callable[[], None]:
    """Does so many steps. A bare loop's samples are there already: looking them up is not what is measured."""
    return partial(loop.run, loop.prepare(count)) if isinstance(loop, Bare) else partial(loop.steps, count)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mfu(loop: Ours, tokens_per_second: float) -> float | None:
    peak = flops.peak(torch.cuda.get_device_name(loop.device)) if loop.device.type == "cuda" else None
    return flops.mfu(loop.dims.flops_per_token, tokens_per_second, peak) if peak else None


KINDS = (
    ("attention", r"flash|fmha|attention|sdpa"),
    ("products", r"gemm|nvjet|cutlass|xmma|cublas|splitk|matmul|(^|:)mm\b|addmm|scaled_mm"),
    ("loss", r"softmax|nll|cross_entropy"),
    ("optimizer, norm", r"adam|multi_tensor|foreach"),
    ("compiled, fused", r"triton|graph_|cpp_fused"),
    ("copies, casts", r"copy|cast|memcpy|memset|_to_"),
    ("embedding", r"embedding|index"),
)


def profile(loop: Loop, count: int = 2) -> list[str]:
    """Lines that tell where the device's time goes in these steps."""
    silence_kineto()
    on_gpu = loop.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    run = _ready(loop, count)
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profiler:
        began = time.perf_counter()
        run()
        wait(loop.device)
        seconds = time.perf_counter() - began
    found = profiler.profiler.kineto_results.events()
    # Annotations (an optimizer's step, a compiled region) span what is counted already.
    found = [event for event in found if "annotation" not in event.activity_type()]
    events = [event for event in found if ("CUDA" in str(event.device_type())) == on_gpu]
    return _lines(events, seconds, count, on_gpu=on_gpu)


def _lines(events: list[Any], seconds: float, count: int, *, on_gpu: bool) -> list[str]:
    kinds: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for event in events:
        name, spent = event.name(), event.duration_ns() / 1e6 / count
        kernels[name] = kernels.get(name, 0.0) + spent
        kinds[_kind(name)] = kinds.get(_kind(name), 0.0) + spent
    whole = seconds * 1e3 / count
    busy = (
        total_length(merge_spans((event.start_ns(), event.start_ns() + event.duration_ns()) for event in events))
        / 1e6
        / count
    )
    # On a CPU operations lie within each other, so parts add up to more than the whole.
    lines = [f"    {whole:8.1f} ms a step, profiled; idle {100 * max(0.0, 1 - busy / whole):.1f} %"]
    for name, spent in sorted(kinds.items(), key=lambda item: -item[1]):
        lines.append(f"    {spent:8.1f} ms {100 * spent / whole:5.1f} %  {name}")
    lines.append("    the dearest:")
    for name, spent in sorted(kernels.items(), key=lambda item: -item[1])[:10]:
        lines.append(f"    {spent:8.1f} ms {100 * spent / whole:5.1f} %  {name[:90]}")
    return lines


def _kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


class _LossRecorder(NullReporter):
    """Reports nothing and remembers the last loss."""

    def __init__(self) -> None:
        self.loss = float("nan")

    def log(self, step: int, **values: float) -> None:
        self.loss = values.get("loss", self.loss)


class _RecordingReporter(Reporter):
    """A reporter that remembers the last loss."""

    loss = float("nan")

    def log(self, step: int, **values: float) -> None:
        self.loss = values.get("loss", self.loss)
        super().log(step, **values)


@contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield
