"""The ranks of `pp` hold consecutive blocks, a stage each; micro-batches flow through them (torch's pipelining).

GPipe: arXiv 1811.06965. 1F1B: PipeDream-Flush, arXiv 2006.09503. Interleaved: arXiv 2104.04473. Zero-bubble schedules:
arXiv 2401.10241. DualPipeV: DeepSeek-V3, arXiv 2412.19437.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from training.config.shape import Misfit, Shape, divisors

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from training.data import Batch, Task
    from training.parallel._stages import Pipeline
    from training.step.arithmetic import Accumulating, MicroBatch

AXES = ("pp",)
SINGLE = ("GPipe", "1F1B")
"""Schedules with one stage a rank; the others have several."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Rank r holds stages r and 2·pp − 1 − r."""


def check(shape: Shape, *, schedule: str = "1F1B", stages_per_rank: int | None = None, **options: object) -> None:
    """Every stage has a block, and there are micro-batches enough to fill the pipeline."""
    pp, dims = shape["pp"], shape.dims
    if dims is None:
        raise Misfit("mesh.pp", "this recipe's model does not say where it can be cut. Leave the axis out.")
    if dims.tied:
        way_out = "Leave out mesh.pp, or write false: weights to start from that are tied stay so."
        raise Misfit("language.tied", f"a pipeline's ends lie on different ranks. {way_out}")
    each = per_rank(schedule, stages_per_rank)
    if stages_per_rank is not None and each != stages_per_rank:
        raise Misfit("pipeline.stages_per_rank", f"is {stages_per_rank}, but {schedule} has {each}. Leave it out.")
    if pp * each > dims.layers:
        room = shape.ranks_for("pp")
        fits = max(count for count in range(1, max(1, dims.layers // each) + 1) if room % count == 0)
        message = f"{pp} ranks × {each} stages need {pp * each} blocks, the model has {dims.layers}. At most: {fits}."
        raise Misfit("mesh.pp", message)
    micro = shape.micro_batch or shape.share // micro_batches(shape.share, shape, schedule=schedule)
    count, least, unit = shape.share // micro, _least(pp, schedule), _unit(pp, schedule)
    if count < least or count % unit:
        wanted = max(least, -(-count // unit) * unit)
        message = (
            f"{shape.global_batch} gives each pipeline {count} micro-batch{'es' * (count != 1)} of {micro}; "
            f"{schedule} on {pp} ranks needs {f'a multiple of {unit}' if unit > 1 else f'at least {least}'}. "
            f"The nearest that does: {wanted * micro * shape.coordinates}."
        )
        raise Misfit("global_batch", message)


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    schedule: Annotated[
        Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
        "In which order the stages work on the micro-batches.",
    ] = "1F1B",
    stages_per_rank: Annotated[int | None, "1..16", "Of the interleaved schedules; 2 if left out."] = None,
) -> nn.Module:
    from training.parallel._stages import Pipeline, cut

    axis = mesh["pp"]
    ranks = stage_ranks(axis.size(), schedule, stages_per_rank)
    mine = [number for number, rank in enumerate(ranks) if rank == axis.get_local_rank()]
    return Pipeline(cut(model, mine, len(ranks)), mine, ranks, group=axis.get_group(), schedule=schedule)


def forward_backward(
    task: Task, model: Pipeline, micro_batches: Sequence[MicroBatch], accumulating: Accumulating
) -> Tensor:
    """Leaves the gradient of the global batch's mean loss, as step.arithmetic's does; this pipeline's own mean loss."""
    return model.forward_backward(task, micro_batches)


def score(task: Task, model: Pipeline, batch: Batch) -> dict[str, Tensor]:
    """The task's score, on every rank of the pipeline."""
    return model.score(task, batch)


def per_rank(schedule: str, wanted: int | None) -> int:
    if schedule in SINGLE:
        return 1
    return 2 if schedule in V_SHAPED else wanted or 2


def stage_ranks(pp: int, schedule: str, stages_per_rank: int | None) -> list[int]:
    """The rank that has each stage: round and round, or there and back."""
    once = list(range(pp))
    if schedule in V_SHAPED:
        return [*once, *reversed(once)]
    return once * per_rank(schedule, stages_per_rank)


def micro_batches(share: int, shape: Shape, *, schedule: str = "1F1B", **options: object) -> int:
    """Into how many micro-batches a share is cut if nobody says: twice the ranks, or what comes nearest and is even."""
    pp = shape["pp"]
    unit, least = _unit(pp, schedule), _least(pp, schedule)
    fits = [count for count in divisors(share) if count % unit == 0 and count >= least]
    return min(fits, key=lambda count: abs(count - 2 * pp), default=share)


def _least(pp: int, schedule: str) -> int:
    return 2 * pp if schedule in ("DualPipeV",) else 1 if schedule == "GPipe" else pp


def _unit(pp: int, schedule: str) -> int:
    """The interleaved schedules work in rounds of pp micro-batches."""
    return pp if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") else 1
