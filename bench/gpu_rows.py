"""The rows of bench.gpu. Each is paired: A/B/A/B in one process, the median of the ratios; all of it is printed."""

from __future__ import annotations

import gc
import math
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu_loops import Bare, Loop, Ours, Size, mfu, profile, timed, wait, write_data
from bench.gpu_parts import parts
from training.checkpoint.cadence import Cadence, Mtbf
from training.checkpoint.pruning import Retention
from training.checkpoint.saving import Checkpoints
from training.checkpoint.writing import ManifestFields, SaveOptions
from training.reporting.reporter import NullReporter
from training.runtime.distributed import World
from training.units import GIB

TENSORS = 96

# What fits 139 GiB beside a second copy of the model; where it doesn't, the micro-batch is halved.
M350 = Size("350m", {"preset": "350m"}, micro_batch=16, global_batch=64, window=10)
B1 = Size("1b", {"preset": "1b"}, micro_batch=16, global_batch=32, window=8)
WIDE = Size(
    "1.5b-wide",  # six blocks of the shapes of Llama-8B: what FP8 is made for
    {"layers": 6, "heads": 32, "kv_heads": 8, "head_width": 128, "hidden": 14_336, "context": 2048},
    micro_batch=8,
    global_batch=16,
    window=8,
)
TINY = Size(
    "tiny",
    {"layers": 2, "heads": 2, "kv_heads": 1, "head_width": 16, "hidden": 64, "context": 32},
    micro_batch=2,
    global_batch=4,
    window=2,
    vocabulary=512,
)


@dataclass(frozen=True)
class Row:
    """Represents one line of the table; `met` is None where there is no bar."""

    name: str
    figure: str
    bar: str
    met: bool | None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """The machine and settings that rows are measured with."""

    world: World
    folder: Path
    pairs: int
    tiny: bool
    compiles: bool = True
    """Where tiny."""
    until: float = math.inf
    """By the monotonic clock: afterwards no further pair is begun."""

    def sizes(self, *sizes: Size) -> list[Size]:
        if not self.tiny:
            return list(sizes)
        return [replace(TINY, name=f"tiny-{size.name}", compile=self.compiles) for size in sizes]

    def data(self, size: Size) -> Path:
        folder = self.folder / f"data-{size.vocabulary}"
        return folder if folder.exists() else write_data(folder, size.vocabulary, 60_000 if self.tiny else 8_000_000)

    def has_time_for(self, pair: int, seconds: float) -> bool:
        """Return whether there is time for another pair that takes `seconds`, after `pair` pairs."""
        return pair < self.pairs and (pair < 1 or time.monotonic() + seconds < self.until)

    def runs(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder


def mfu_row(setting: Setting) -> Iterator[Row]:
    """bf16 and compile, 2,048 tokens a sample: what part of the peak, and beside a bare loop."""
    for size in setting.sizes(M350, B1):
        yield from _fitted(size, lambda size: _mfu(setting, size))


def _mfu(setting: Setting, size: Size) -> list[Row]:
    with closing(Ours(size, setting.data(size), setting.runs(f"mfu-{size.name}"), setting.world)) as ours:
        bare = Bare(ours)
        _describe(ours)
        rates = _paired(setting, {"ours": ours, "bare": bare}, ours.tokens_per_step)
        ratios = _ratios("ours ÷ bare", rates["ours"], rates["bare"])
        reached = mfu(ours, statistics.median(rates["ours"]))
        theirs = mfu(ours, statistics.median(rates["bare"]))
        print(f"  MFU: ours {_percent(reached)}, bare {_percent(theirs)}")
        for name, loop in (("ours", ours), ("bare", bare)):
            _print_profile(name, loop)
    median = statistics.median(ratios)
    facts = {"mfu": reached, "mfu_bare": theirs, "ratios": ratios, "micro_batch": size.micro_batch}
    return [
        Row(
            f"MFU, {size.name}, bf16{' + compile' * size.compile}",
            _percent(reached),
            "≥ 45 %",
            _met(reached, 0.45),
            facts,
        ),
        Row(f"  beside a bare loop, {size.name}", f"{median:.3f}×", "≥ 0.97×", median >= 0.97, {"ratios": ratios}),
    ]


def fp8_row(setting: Setting) -> Iterator[Row]:
    """FP8 against bf16. The bar is for the wide model's products; those of 1b, 2,048 wide, are told, too."""
    wide, narrow = setting.sizes(WIDE, B1)
    yield from _fitted(wide, lambda size: _fp8(setting, size))
    for row in _fitted(narrow, lambda size: _fp8(setting, size)):
        yield replace(row, bar="–", met=None)


def _fp8(setting: Setting, size: Size) -> list[Row]:
    try:
        import torchao  # noqa: F401
    except ImportError:
        return [Row(f"FP8 against bf16, {size.name}", "not measured: torchao is not installed", "≥ 1.10×", None)]
    data = setting.data(size)
    with ExitStack() as open_:
        loops = {
            dtype: open_.enter_context(
                closing(Ours(size.but(dtype=dtype), data, setting.runs(f"{dtype}-{size.name}"), setting.world))
            )
            for dtype in ("fp8", "bf16")
        }
        _describe(loops["bf16"])
        rates = _paired(setting, dict(loops), loops["bf16"].tokens_per_step)
        ratios = _ratios("fp8 ÷ bf16", rates["fp8"], rates["bf16"])
        _print_profile("fp8", loops["fp8"])
    median = statistics.median(ratios)
    return [Row(f"FP8 against bf16, {size.name}", f"{median:.3f}×", "≥ 1.10×", median >= 1.10, {"ratios": ratios})]


def telemetry_row(setting: Setting) -> list[Row]:
    """Reports, samples from inside and verdicts as by default, against none of them."""
    (size,) = setting.sizes(replace(M350, window=24))
    data = setting.data(size)
    sampled = {} if setting.tiny else {"sample_seconds": 60.0}
    on = Ours(size.but(**sampled), data, setting.runs("telemetry-on"), setting.world)
    off = Ours(size, data, setting.runs("telemetry-off"), setting.world, telemetry=False)
    _describe(on)
    rates = _paired(setting, {"on": on, "off": off}, on.tokens_per_step)
    ratios = _ratios("off ÷ on", rates["off"], rates["on"])
    on.close()
    off.close()
    cost = statistics.median(ratios) - 1
    return [
        Row(f"telemetry on against off, {size.name}", f"{100 * cost:.2f} %", "≤ 1 %", cost <= 0.01, {"ratios": ratios})
    ]


def determinism_row(setting: Setting) -> list[Row]:
    """Measure what each level of determinism costs compared to fast; no bar."""
    (size,) = setting.sizes(M350)
    data = setting.data(size)
    levels = ("fast", "scientific", "bitwise")
    loops = {
        level: Ours(size.but(determinism=level), data, setting.runs(f"level-{level}"), setting.world)
        for level in levels
    }
    _describe(loops["fast"])
    rates = _paired(setting, dict(loops), loops["fast"].tokens_per_step)
    rows = []
    for level in levels:
        rate = statistics.median(rates[level])
        ratios = _ratios(f"{level} ÷ fast", rates[level], rates["fast"])
        loops[level].close()
        figure = f"{rate:,.0f} tokens/s, {statistics.median(ratios):.3f}×"
        rows.append(Row(f"determinism {level}, {size.name}", figure, "–", None, {"rate": rate, "ratios": ratios}))
    return rows


def stall_row(setting: Setting) -> list[Row]:
    """Measure how long a checkpoint of 12 GB on one rank stalls training: ours, and torch's own `dcp.save`."""
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    bytes_ = 12 * 2**20 if setting.tiny else 12 * 10**9
    elements = bytes_ // 4 // TENSORS
    state = {"model": {f"part.{n}": torch.randn(elements, device=setting.world.device) for n in range(TENSORS)}}
    job = setting.runs("stall") / "job"
    (job / "attempt-1").mkdir(parents=True)
    cadence = Cadence(0, Mtbf(3600.0, "config"))
    saves = Checkpoints(
        job,
        job / "attempt-1",
        setting.world,
        SaveOptions(generation=1, retention=Retention(last=1), cadence=cadence),
        reporter=NullReporter(),
    )
    saves.start_from(None)
    saves.prepare(state)

    def save_with_dcp(number: int) -> float:
        target = setting.runs("dcp")
        wait(setting.world.device)
        began = time.perf_counter()
        with warnings.catch_warnings():  # it warns that it assumes a single process, which is what we ask for
            warnings.simplefilter("ignore", UserWarning)
            dcp_save(state, checkpoint_id=target, no_dist=True)
        seconds = time.perf_counter() - began
        shutil.rmtree(target)
        return seconds

    def save_with_ours(number: int) -> tuple[float, float]:
        wait(setting.world.device)
        facts = ManifestFields(step=number, consumed_samples=0, layout={}, config_hash="", config={}, data="")
        began = time.perf_counter()
        saves.save(state, facts)
        stall = time.perf_counter() - began
        saves.wait()
        return stall, time.perf_counter() - began

    save_with_dcp(0)
    save_with_ours(1)
    found: list[tuple[float, float, float]] = []
    while setting.has_time_for(len(found), sum(found[-1][::2]) if found else 0.0):
        found.append((save_with_dcp(len(found) + 2), *save_with_ours(len(found) + 2)))
    print(f"  {bytes_ / 1e9:.3g} GB in {TENSORS} tensors; seconds")
    for label, row in zip(("dcp.save", "ours, stall", "ours, written"), zip(*found, strict=True), strict=True):
        print(f"  {label:14}" + "".join(f"{value:9.3f}" for value in row))
    shutil.rmtree(job.parent, ignore_errors=True)
    stall = statistics.median(ours for _, ours, _ in found)
    share = statistics.median(_ratios("stall ÷ dcp.save", [value[1] for value in found], [value[0] for value in found]))
    label = f"{bytes_ / 1e9:.3g} GB"
    return [
        Row(f"checkpoint stall, {label}", f"{stall:.3f} s", "≤ 1 s", stall <= 1.0),
        Row(f"  beside dcp.save, {label}", f"{100 * share:.1f} %", "≤ 10 %", share <= 0.10),
    ]


def parts_row(setting: Setting) -> list[Row]:
    """Measure each part of a step by itself, to see what to improve where MFU falls short; no bar."""
    for size in setting.sizes(M350, B1):
        print(f"{size.name}: one micro-batch of {size.micro_batch} samples, forward and backward", flush=True)
        for part in parts(size, setting.world.device):
            took = "–" if math.isnan(part.milliseconds) else f"{part.milliseconds:.2f} ms"
            print(f"  {took:>12}  {part.name:44} {part.reached}".rstrip(), flush=True)
        _free()
    return []


ROWS: dict[str, Callable[[Setting], Iterable[Row]]] = {
    "mfu": mfu_row,
    "fp8": fp8_row,
    "stall": stall_row,
    "telemetry": telemetry_row,
    "determinism": determinism_row,
    "parts": parts_row,
}


def _paired(setting: Setting, loops: dict[str, Loop], tokens_per_step: int) -> dict[str, list[float]]:
    """Tokens a second of each, window by window in turn; the first turn, in which all compile, is left out."""
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        timed(loop, 3)
    pair, began, took = 0, time.monotonic(), 0.0
    while setting.has_time_for(pair, took):
        for name, loop in loops.items():
            count = loop.size.window
            rates[name].append(tokens_per_step * count / timed(loop, count))
        pair += 1
        took = (time.monotonic() - began) / pair
    for name, loop in loops.items():
        row = "".join(f"{rate:12,.0f}" for rate in rates[name])
        print(f"  {name:11}{row}  tokens/s, last loss {loop.loss:.4f}")
    if setting.world.device.type == "cuda":
        print(f"  most memory: {torch.cuda.max_memory_allocated() / GIB:.1f} GiB, all of them together", flush=True)
    return rates


def _ratios(what: str, ours: list[float], theirs: list[float]) -> list[float]:
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    row = " ".join(f"{ratio:.4f}" for ratio in ratios)
    print(f"  {what}: {row}; median {statistics.median(ratios):.4f}", flush=True)
    return ratios


def _describe(loop: Ours) -> None:
    dims, size = loop.dims, loop.size
    print(
        f"{size.name}: {dims.parameters:,} parameters ({dims.layers} × {dims.width}, {dims.heads}/{dims.kv_heads} "
        f"heads of {dims.head_width}, {dims.hidden}), vocabulary {dims.vocabulary:,}, {dims.context} tokens a sample,\n"
        f"  {loop.tokens_per_step:,} tokens a step in micro-batches of {size.micro_batch} samples, windows of "
        f"{size.window} steps, seed {loop.config.seed}",
        flush=True,
    )


def _fitted(size: Size, measure: Callable[[Size], list[Row]]) -> list[Row]:
    """Halves the micro-batch where memory does not do."""
    while True:
        _free()
        try:
            return measure(size)
        except torch.OutOfMemoryError:
            if size.micro_batch == 1:
                raise
        print(f"{size.name}: a micro-batch of {size.micro_batch} does not fit; half of it", flush=True)
        size = replace(size, micro_batch=size.micro_batch // 2)


def _free() -> None:
    """Forgets what was compiled, as in a new process: else another size is compiled again for shapes that vary."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _print_profile(name: str, loop: Loop) -> None:
    """Print where its time goes; a profiler that does not work here loses no other figure."""
    try:
        lines = profile(loop)
    except RuntimeError as error:
        lines = [f"    not known: {error}".splitlines()[0]]
    print(f"  where {name} spends its time:", *lines, sep="\n", flush=True)


def _met(value: float | None, least: float) -> bool | None:
    return None if value is None else value >= least


def _percent(value: float | None) -> str:
    return "no peak known" if value is None else f"{100 * value:.1f} %"
