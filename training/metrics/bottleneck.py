"""What bounds a run: a straggler, compute, memory, communication, input or the host; by what was measured, no torch.

The rule. A rank that is named for keeping the others waiting comes first: what they wait for it looks like
communication to each of them, and no remedy for that would help. Else three shares of a step are losses: *input* (the
loop waits for its data), *communication* (something is sent and nothing computed) and *host* (the device has nothing to
do though nothing is waited for: Python, launches, our own loop). The largest of those that reach LOSS names the bound.
Where none does, the device is busy; then it is *compute* bound if at least MATMUL of its busy time goes into products
of matrices, attention and convolutions, or the model reaches GOOD_MFU of the GPUs' peak, and else *memory* bound:
element-wise work, norms and copies wait for memory. What was not measured decides nothing.
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
LEAST_STEPS = 20

SPLIT = ("forward", "backward", "forward_backward", "optimizer", "communication", "data", "checkpoint", "other")
"""The parts of a mean step, in the order in which they are drawn; seconds that add up to it."""


@dataclass(frozen=True)
class Late:
    """The rank that the others wait for most just now (training.guards.stragglers)."""

    rank: int
    factor: float
    """Its own time over the median rank's."""
    part: str
    """Where most of the difference is: data, compute or host."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of some steps. Shares are parts of 1; None was not measured."""

    steps: int
    split: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a mean step by part (see SPLIT)."""
    exchange: float = 0.0
    """Seconds in which replicas that stay apart exchange after a step, where no sample looks; part of communication."""
    busy: float | None = None
    """The part of the sampled step's own time in which something was computed."""
    exposed: float | None = None
    """The part of that time in which something was sent and nothing computed."""
    matmul: float | None = None
    """The part of what was computed that is products of matrices, attention and convolutions."""
    mfu: float | None = None
    on_gpu: bool = False
    world: int = 1
    parallelism: str = ""
    dtype: str = ""
    compiled: bool = False
    refused: frozenset[str] = frozenset()
    """Which of compile, fp8 and reshard this run can't be told to try, since its layout refuses it or it does so."""
    accumulation: int = 1
    """Micro-batches a step on a rank."""
    late: Late | None = None

    @property
    def seconds(self) -> float:
        return sum(self.split.values())

    def share(self, part: str) -> float:
        return self.split.get(part, 0.0) / self.seconds if self.seconds else 0.0

    @property
    def losses(self) -> dict[Bound, float]:
        """The lost parts of a step by what they are lost to."""
        exchange = self.exchange / self.seconds if self.seconds else 0.0
        own = 1 - self.share("data") - self.share("checkpoint") - exchange
        found: dict[Bound, float] = {"input": self.share("data"), "communication": self.share("communication")}
        if self.busy is not None:
            idle = max(0.0, 1 - self.busy - (self.exposed or 0.0))
            # What lies between steps is nobody's work but the loop's; of the steps' own time what the sample says.
            found["host"] = self.share("other") + idle * max(0.0, own - self.share("other"))
        elif self.share("other") >= LOSS:
            found["host"] = self.share("other")
        return found


@dataclass(frozen=True)
class Bottleneck:
    """`bound` is None where not enough was measured; then `because` says what is missing."""

    bound: Bound | None
    because: str
    remedy: str = ""
    """One thing to try."""

    def told(self) -> dict[str, Any]:
        return asdict(self)


def judge(measured: Measured) -> Bottleneck:
    """What bounds these steps."""
    if measured.steps < LEAST_STEPS or not measured.seconds:
        return Bottleneck(None, f"Not enough measured yet: {measured.steps} steps, and a verdict takes {LEAST_STEPS}.")
    if measured.late is not None:
        return _of_straggler(measured.late)
    bound, lost = max(measured.losses.items(), key=lambda loss: loss[1])
    if lost >= LOSS:
        return Bottleneck(bound, _lost(bound, lost, measured), _remedy(bound, measured))
    if measured.matmul is None and (measured.mfu or 0.0) < GOOD_MFU:
        return Bottleneck(None, "Not enough measured yet: no step has been looked at from inside (run.sample_seconds).")
    if (measured.mfu or 0.0) >= GOOD_MFU:
        because = f"The model reaches {_percent(measured.mfu)} of the GPUs' bf16 peak."
        return Bottleneck("compute", because, _remedy("compute", measured))
    bound = "compute" if (measured.matmul or 0.0) >= MATMUL else "memory"
    because = (
        f"{_percent(measured.matmul)} of what is computed are products of matrices and attention; "
        f"the largest loss, to {_LOST_TO[_largest(measured)]}, is {_percent(lost)} of a step."
    )
    return Bottleneck(bound, because, _remedy(bound, measured))


def _of_straggler(late: Late) -> Bottleneck:
    because = (
        f"Rank {late.rank} takes {late.factor:.1f} times the usual time of its own, most of it {_LATE[late.part]}; "
        "all others wait for it."
    )
    return Bottleneck("straggler", because, f"Look at that rank's node: {_LOOK_AT[late.part]}.")


_LATE = {"data": "waiting for data", "compute": "computing", "host": "between steps"}
_LOOK_AT = {
    "data": "the way to its data is slower than the others'",
    "compute": "clocks and temperature of its GPU, and other programs there; resources.exclude_nodes goes round it",
    "host": "other programs on its processors; resources.exclude_nodes goes round it",
}


def _largest(measured: Measured) -> Bound:
    return max(measured.losses.items(), key=lambda loss: loss[1])[0]


_LOST_TO: dict[Bound, str] = {"input": "data", "communication": "communication", "host": "the host"}


def _lost(bound: Bound, lost: float, measured: Measured) -> str:
    part = _percent(lost)
    if bound == "input":
        return f"{part} of a step is spent waiting for data."
    if bound == "communication":
        return f"During {part} of a step something is sent and nothing computed."
    where = "the GPU" if measured.on_gpu else "the processor"
    return f"During {part} of a step {where} computes nothing, and waits neither for data nor for other ranks."


def _remedy(bound: Bound, measured: Measured) -> str:
    """One thing, the likeliest first."""
    if bound == "input":
        return "Put the data on a disk of the node, and make it ready beforehand (python -m training prepare)."
    if bound == "communication":
        if measured.parallelism == "fsdp" and measured.on_gpu and "reshard" not in measured.refused:
            return 'Try [run.fsdp] reshard = "never": each block is then gathered once a step, for more memory.'
        if 2 * measured.exchange > measured.split.get("communication", 0.0):
            return "Try a larger every: replicas then become one model less often."
        if measured.world > 1 and measured.accumulation == 1:
            return "Try a larger global_batch with the same micro_batch: gradients are then exchanged less often."
        return "Try fewer ranks with more samples each, or ranks that lie closer together: all of them on one node."
    # Where a rank's whole share goes through the model at once, only a larger batch makes that more.
    larger = "a larger micro_batch" if measured.accumulation > 1 else "a larger global_batch"
    compiles = measured.on_gpu and not measured.compiled and "compile" not in measured.refused
    if bound == "host":
        if compiles:
            return f"Try compile = true, or {larger}: fewer and larger launches."
        return f"Try {larger}: more work in each operation."
    if bound == "memory":
        if measured.on_gpu and measured.dtype == "fp32":
            return 'Try dtype = "bf16": half the bytes for the same numbers.'
        if compiles:
            return "Try compile = true: element-wise operations are fused, so each number is moved less often."
        return f"Try {larger}, or a wider model: more arithmetic for each number that is moved."
    if measured.on_gpu and measured.dtype == "fp32":
        return 'Try dtype = "bf16": the same products several times as fast.'
    if measured.on_gpu and measured.dtype == "bf16":
        fp8 = "" if "fp8" in measured.refused else 'dtype = "fp8" where the model is wide, or '
        return f"As it should be. Try {fp8}more GPUs."
    return "As it should be: more ranks make it faster."


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
    """A mean step's seconds by disjoint parts.

    `step`: without checkpoints, `data` waited for in it, `parts` as timed. `exposed_by_part`: of each part's time, what
    a sample showed as communication that nothing hid; it becomes a part of its own, and an exchange between steps is
    nothing else. What is left of the step is other; where a device works beside the host, data that was waited for
    while it worked cost nothing.
    """
    split = dict.fromkeys(SPLIT, 0.0)
    for part, seconds in parts.items():
        exposed = 1.0 if part == "exchange" else (exposed_by_part or {}).get(part, 0.0)
        sent = seconds * min(1.0, max(0.0, exposed))
        split[part] = seconds - sent
        split["communication"] += sent
    left = max(0.0, step - sum(parts.values()))
    split["data"] = min(data, left)
    split["other"] = left - split["data"]
    split["checkpoint"] = checkpoint
    return {part: seconds for part, seconds in split.items() if seconds > 0}
