"""Decide what limits a run: a straggler, compute, memory, communication, input or the host. No torch.

The rule. A straggler comes first: to the other ranks, waiting for it looks like communication, and no remedy for that
would help. Otherwise three shares of a step are losses: *input* (the loop waits for data), *communication* (something
is sent and nothing is computed) and *host* (the device idles though nothing is waited for: Python, launches, our loop).
The largest loss of at least LOSS is the limit. Without one the device is busy; the run is *compute* bound if at least
MATMUL of the busy time goes into matrix products, attention and convolutions, or if the model reaches GOOD_MFU of the
GPUs' peak, and else *memory* bound: element-wise operations, norms and copies wait for memory. A quantity that was not
measured decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Bound = Literal["straggler", "compute", "memory", "communication", "input", "host"]
BOUNDS: tuple[Bound, ...] = ("straggler", "compute", "memory", "communication", "input", "host")

LOSS = 0.15
MATMUL = 0.5
GOOD_MFU = 0.35
MIN_STEPS = 20

SPLIT = ("forward", "backward", "forward_backward", "optimizer", "communication", "data", "checkpoint", "other")
"""The parts of a mean step in the order in which they are drawn; their seconds add up to it."""


@dataclass(frozen=True)
class SlowRank:
    """The rank that the others currently wait for most (training.guards.stragglers)."""

    rank: int
    factor: float
    """Its own time divided by the median rank's."""
    part: str
    """The part of a step with most of the difference: data, compute or host."""


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """Measurements of some steps. Shares are fractions of 1; None: not measured."""

    steps: int
    split: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a mean step by part (see SPLIT)."""
    exchange: float = 0.0
    """Seconds of exchanges after a step, which no sample covers; part of communication."""
    busy: float | None = None
    """Fraction of the sampled step in which something was computed."""
    exposed: float | None = None
    """Fraction of the sampled step in which something was sent and nothing computed."""
    matmul: float | None = None
    """Fraction of the computing time spent on matrix products, attention and convolutions."""
    mfu: float | None = None
    on_gpu: bool = False
    world: int = 1
    parallelism: str = ""
    dtype: str = ""
    compiled: bool = False
    unusable_remedies: frozenset[str] = frozenset()
    """Which of compile, fp8 and reshard cannot help: the layout refuses them, or they are in use already."""
    accumulation: int = 1
    """Micro-batches per step on a rank."""
    slow_rank: SlowRank | None = None

    @property
    def seconds(self) -> float:
        return sum(self.split.values())

    def share(self, part: str) -> float:
        return self.split.get(part, 0.0) / self.seconds if self.seconds else 0.0

    @property
    def losses(self) -> dict[Bound, float]:
        """The lost fractions of a step, by cause."""
        exchange = self.exchange / self.seconds if self.seconds else 0.0
        compute_share = 1 - self.share("data") - self.share("checkpoint") - exchange
        losses: dict[Bound, float] = {"input": self.share("data"), "communication": self.share("communication")}
        if self.busy is not None:
            idle = max(0.0, 1 - self.busy - (self.exposed or 0.0))
            # Time between steps is the loop's; within steps, the sampled idle time.
            losses["host"] = self.share("other") + idle * max(0.0, compute_share - self.share("other"))
        elif self.share("other") >= LOSS:
            losses["host"] = self.share("other")
        return losses


@dataclass(frozen=True)
class Bottleneck:
    """The verdict. `bound` is None if too little was measured; then `because` says what is missing."""

    bound: Bound | None
    because: str
    remedy: str = ""
    """A single thing to try."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(measured: StepMeasurement) -> Bottleneck:
    """Return what limits these steps."""
    if measured.steps < MIN_STEPS or not measured.seconds:
        return Bottleneck(None, f"Not enough data yet: {measured.steps} of {MIN_STEPS} steps measured.")
    if measured.slow_rank is not None:
        return _straggler_verdict(measured.slow_rank)
    bound, lost = max(measured.losses.items(), key=lambda loss: loss[1])
    if lost >= LOSS:
        return Bottleneck(bound, _loss_text(bound, lost, measured), _remedy(bound, measured))
    if measured.matmul is None and (measured.mfu or 0.0) < GOOD_MFU:
        return Bottleneck(None, "Not enough data yet: no step has been sampled (run.sample_seconds).")
    if (measured.mfu or 0.0) >= GOOD_MFU:
        because = f"The model reaches {_percent(measured.mfu)} of the GPUs' bf16 peak."
        return Bottleneck("compute", because, _remedy("compute", measured))
    bound = "compute" if (measured.matmul or 0.0) >= MATMUL else "memory"
    because = (
        f"{_percent(measured.matmul)} of the computing time is matrix products and attention; "
        f"the largest loss, to {_LOST_TO[_largest(measured)]}, is {_percent(lost)} of a step."
    )
    return Bottleneck(bound, because, _remedy(bound, measured))


def _straggler_verdict(slow: SlowRank) -> Bottleneck:
    because = (
        f"Rank {slow.rank} takes {slow.factor:.1f} times as long as the median rank, mostly {_SLOW_IN[slow.part]}; "
        "all other ranks wait for it."
    )
    return Bottleneck("straggler", because, f"Check that rank's node: {_CHECKS[slow.part]}.")


_SLOW_IN = {"data": "waiting for data", "compute": "computing", "host": "between steps"}
_CHECKS = {
    "data": "its access to the data is slower than the others'",
    "compute": "clocks and temperature of its GPU, and other programs on it; resources.exclude_nodes avoids the node",
    "host": "other programs on its CPUs; resources.exclude_nodes avoids the node",
}


def _largest(measured: StepMeasurement) -> Bound:
    return max(measured.losses.items(), key=lambda loss: loss[1])[0]


_LOST_TO: dict[Bound, str] = {"input": "data", "communication": "communication", "host": "the host"}


def _loss_text(bound: Bound, lost: float, measured: StepMeasurement) -> str:
    part = _percent(lost)
    if bound == "input":
        return f"{part} of a step is spent waiting for data."
    if bound == "communication":
        return f"During {part} of a step data is sent and nothing is computed."
    where = "the GPU" if measured.on_gpu else "the CPU"
    return f"During {part} of a step {where} is idle, waiting neither for data nor for other ranks."


def _remedy(bound: Bound, measured: StepMeasurement) -> str:
    """Return the single most promising remedy."""
    if bound == "input":
        return "Put the data on a local disk of the node, and prepare it in advance (python -m training prepare)."
    if bound == "communication":
        if measured.parallelism == "fsdp" and measured.on_gpu and "reshard" not in measured.unusable_remedies:
            return 'Try [run.fsdp] reshard = "never": each block is gathered once per step, which takes more memory.'
        if 2 * measured.exchange > measured.split.get("communication", 0.0):
            return "Try a larger every: replicas then synchronise less often."
        if measured.world > 1 and measured.accumulation == 1:
            return "Try a larger global_batch with the same micro_batch: gradients are then exchanged less often."
        return "Try fewer ranks with more samples each, or place all ranks on one node."
    # Without accumulation, a rank's micro-batch can only grow with the global batch.
    larger = "a larger micro_batch" if measured.accumulation > 1 else "a larger global_batch"
    compiles = measured.on_gpu and not measured.compiled and "compile" not in measured.unusable_remedies
    if bound == "host":
        if compiles:
            return f"Try compile = true, or {larger}: fewer and larger launches."
        return f"Try {larger}: more work in each operation."
    if bound == "memory":
        if measured.on_gpu and measured.dtype == "fp32":
            return 'Try dtype = "bf16": half the bytes per number.'
        if compiles:
            return "Try compile = true: fused element-wise operations move each number less often."
        return f"Try {larger}, or a wider model: more arithmetic per number that is moved."
    if measured.on_gpu and measured.dtype == "fp32":
        return 'Try dtype = "bf16": matrix products are several times as fast.'
    if measured.on_gpu and measured.dtype == "bf16":
        fp8 = "" if "fp8" in measured.unusable_remedies else 'dtype = "fp8" where the model is wide, or '
        return f"This is as it should be. To go faster, try {fp8}more GPUs."
    return "This is as it should be. More ranks make it faster."


def _percent(part: float | None) -> str:
    return f"{100 * (part or 0.0):.0f} %"


def split_of(
    *,
    step: float,
    data: float,
    parts: Mapping[str, float],
    checkpoint: float = 0.0,
    exposed_by_part: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Split a mean step's seconds into disjoint parts.

    `step`: without checkpoints; `data`: time waited for data within it; `parts`: as timed. `exposed_by_part`:
    fraction of each part's time that a sample showed as exposed communication, which becomes a part of its own; an
    exchange between steps consists of nothing else. The rest of the step is other. Where a device works in parallel
    to the host, data that was waited for while it worked cost nothing.
    """
    split = dict.fromkeys(SPLIT, 0.0)
    for part, seconds in parts.items():
        exposed = 1.0 if part == "exchange" else (exposed_by_part or {}).get(part, 0.0)
        sent = seconds * min(1.0, max(0.0, exposed))
        split[part] = seconds - sent
        split["communication"] += sent
    rest = max(0.0, step - sum(parts.values()))
    split["data"] = min(data, rest)
    split["other"] = rest - split["data"]
    split["checkpoint"] = checkpoint
    return {part: seconds for part, seconds in split.items() if seconds > 0}
