"""The ranks of `pp` have consecutive blocks, a stage each; micro-batches flow through them (torch's pipelining).

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
    from training.step.arithmetic import MicroBatch, NoSync

AXES = ("pp",)
SINGLE = ("GPipe", "1F1B")
"""Schedules with one stage per rank; the others have several."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules in which rank r has stages r and 2·pp − 1 − r."""


def check(shape: Shape, *, schedule: str = "1F1B", stages_per_rank: int | None = None, **options: object) -> None:
    """Check that every stage has a block, and that there are enough micro-batches to fill the pipeline."""
    pp, dims = shape["pp"], shape.dims
    if dims is None:
        raise Misfit("mesh.pp", "this recipe's model does not say where it can be split. Leave the axis out.")
    if dims.tied:
        remedy = "Leave out mesh.pp, or write false; tied initial weights stay tied."
        raise Misfit("language.tied", f"a pipeline's ends are on different ranks. {remedy}")
    stages = stages_per_rank_of(schedule, stages_per_rank)
    if stages_per_rank is not None and stages != stages_per_rank:
        raise Misfit("pipeline.stages_per_rank", f"is {stages_per_rank}, but {schedule} has {stages}. Leave it out.")
    if pp * stages > dims.layers:
        ranks = shape.ranks_for("pp")
        fits = max(count for count in range(1, max(1, dims.layers // stages) + 1) if ranks % count == 0)
        message = (
            f"{pp} ranks × {stages} stages need {pp * stages} blocks, the model has {dims.layers}. At most: {fits}."
        )
        raise Misfit("mesh.pp", message)
    micro = shape.micro_batch or shape.share // micro_batches(shape.share, shape, schedule=schedule)
    count, minimum, unit = shape.share // micro, _min_micro_batches(pp, schedule), _round_size(pp, schedule)
    if count < minimum or count % unit:
        needed = max(minimum, -(-count // unit) * unit)
        message = (
            f"{shape.global_batch} gives each pipeline {count} micro-batch{'es' * (count != 1)} of {micro}; "
            f"{schedule} on {pp} ranks needs {f'a multiple of {unit}' if unit > 1 else f'at least {minimum}'}. "
            f"The nearest that does: {needed * micro * shape.coordinates}."
        )
        raise Misfit("global_batch", message)


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    schedule: Annotated[
        Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
        "The order in which the stages process the micro-batches.",
    ] = "1F1B",
    stages_per_rank: Annotated[
        int | None, "1..16", "Stages per rank for the interleaved schedules; default: 2."
    ] = None,
) -> nn.Module:
    from training.parallel._stages import Pipeline, split_into_stages

    axis = mesh["pp"]
    ranks = stage_ranks(axis.size(), schedule, stages_per_rank)
    own_stages = [number for number, rank in enumerate(ranks) if rank == axis.get_local_rank()]
    return Pipeline(
        split_into_stages(model, own_stages, len(ranks)), own_stages, ranks, group=axis.get_group(), schedule=schedule
    )


def forward_backward(task: Task, model: Pipeline, micro_batches: Sequence[MicroBatch], no_sync: NoSync) -> Tensor:
    """Leave the gradient of the global batch's mean loss, as step.arithmetic's does.

    Return this pipeline's mean loss.
    """
    return model.forward_backward(task, micro_batches)


def score(task: Task, model: Pipeline, batch: Batch) -> dict[str, Tensor]:
    """Return the task's score, on every rank of the pipeline."""
    return model.score(task, batch)


def stages_per_rank_of(schedule: str, configured: int | None) -> int:
    if schedule in SINGLE:
        return 1
    return 2 if schedule in V_SHAPED else configured or 2


def stage_ranks(pp: int, schedule: str, stages_per_rank: int | None) -> list[int]:
    """Return the rank that has each stage: in turn, or there and back."""
    once = list(range(pp))
    if schedule in V_SHAPED:
        return [*once, *reversed(once)]
    return once * stages_per_rank_of(schedule, stages_per_rank)


def micro_batches(share: int, shape: Shape, *, schedule: str = "1F1B", **options: object) -> int:
    """Return the default number of micro-batches of a share: twice the ranks, or the nearest number that divides it."""
    pp = shape["pp"]
    unit, minimum = _round_size(pp, schedule), _min_micro_batches(pp, schedule)
    fits = [count for count in divisors(share) if count % unit == 0 and count >= minimum]
    return min(fits, key=lambda count: abs(count - 2 * pp), default=share)


def _min_micro_batches(pp: int, schedule: str) -> int:
    return 2 * pp if schedule in ("DualPipeV",) else 1 if schedule == "GPipe" else pp


def _round_size(pp: int, schedule: str) -> int:
    """Return the number of which micro-batches must be a multiple: interleaved schedules work in rounds of pp."""
    return pp if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") else 1
