"""Derive the mesh of a run from its configuration, and check before allocation that it can work. No torch.

training.config.shape explains the axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from training import contracts
from training.config import choices, combinations
from training.config.combinations import AXES
from training.config.dims import Dims
from training.config.run_config import RunConfig
from training.config.shape import (
    DATA_AXES,
    VOCABULARY,
    Misfit,
    Shape,
    axes_of,
    modules,
    nearest_divisors,
    nearest_multiples,
)

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def active_modules(config: RunConfig, shape: Shape) -> list[str]:
    """Return those of `shape.modules` that have something to do: along a single rank the mesh has no axis."""
    candidates = modules(config.parallelism, config.mesh)
    return [name for name in candidates if name == candidates[-1] or any(shape[axis] > 1 for axis in axes_of(name))]


def shape_of(config: RunConfig, world_size: int, dims: Dims | None = None) -> Shape:
    """Return the run's mesh on this many ranks. Raises Misfit with the nearest that works.

    `dims`: the model's sizes, if its data has determined the vocabulary; else they follow from the recipe's options.
    """
    own_axes = axes_of(config.parallelism)
    for axis in config.mesh:
        if axis in DATA_AXES and axis not in own_axes:
            raise Misfit(f"mesh.{axis}", f"is not an axis of {config.parallelism}. {_with_axis(axis)}")
    free_axis = next((axis for axis in reversed(own_axes) if axis not in config.mesh), None)
    given = math.prod(config.mesh.values())
    if world_size % given or (free_axis is None and given != world_size):
        raise _mesh_misfit(config, world_size, given)
    sizes = {axis: config.mesh.get(axis, 1) for axis in (*own_axes, *config.mesh)}
    if free_axis is not None:
        sizes[free_axis] = world_size // given
    order = [*AXES, *(axis for axis in sizes if axis not in AXES)]
    ordered = {axis: sizes[axis] for axis in order if axis in sizes and (sizes[axis] > 1 or axis == own_axes[-1])}
    return Shape(ordered, dims or dims_of(config), config.global_batch, config.micro_batch)


def check(
    config: RunConfig, world_size: int, dims: Dims | None = None, *, allow_uneven: bool = False
) -> Iterator[Misfit]:
    """Yield everything about the mesh that cannot work on this many ranks. `dims`: as for shape_of.

    `allow_uneven`: the run was made for more ranks or some have returned, so shares of the batch may be uneven.
    """
    try:
        shape = shape_of(config, world_size, dims)
    except Misfit as misfit:
        yield misfit
        return
    unit = shape.coordinates * (config.micro_batch or 1)
    if allow_uneven and shape["pp"] == 1:
        if config.global_batch < shape.coordinates:
            message = f"{config.global_batch} samples leave nothing to do for some of {world_size} ranks."
            yield Misfit("global_batch", message)
    elif config.global_batch % shape.coordinates:
        yield Misfit("global_batch", _uneven_batch_text(config, shape, unit))
    elif config.global_batch % unit:  # a pipeline needs the same number of micro-batches everywhere
        fits = nearest_divisors(config.micro_batch or 1, shape.share)
        unit_name = "rank" if shape.coordinates == shape.world_size else "data-parallel coordinate"
        yield Misfit(
            "micro_batch", f"{config.micro_batch} does not divide a {unit_name}'s {shape.share} samples. {fits}"
        )
    recipe = contracts.recipe(config.recipe)
    uncombinable = [*recipe.check(config, shape), *_combination_problems(config, shape)]
    yield from uncombinable
    if shape.dims is None and not recipe.knows_sizes(**config.recipe_options()):
        return  # the sizes come with the initial weights, where this is checked again
    for name in active_modules(config, shape) if not uncombinable else ():
        try:
            contracts.parallelism(name).check(shape, **config.options_of(name))
        except Misfit as misfit:
            yield _vocabulary_misfit(config, shape) if misfit.field == VOCABULARY else misfit
        except ValueError as error:
            yield Misfit(f"mesh.{axes_of(name)[0]}", str(error))


def _vocabulary_misfit(config: RunConfig, shape: Shape) -> Misfit:
    """Return the misfit of a vocabulary that does not divide over tp: unused rows can be added to keep the split."""
    assert shape.dims is not None
    rows, tp = shape.dims.vocabulary, shape["tp"]
    if config.recipe_options().get("from_weights", "none") != "none":
        return Misfit("mesh.tp", f"the weights' vocabulary, {rows}, does not divide by {tp}. Leave the axis out.")
    more = f"Write {-(-rows // tp) * tp}: rows that no token uses are harmless."
    return Misfit(f"{config.recipe}.{VOCABULARY}", f"is {rows}, which does not divide by mesh.tp, {tp}. {more}")


def _combination_problems(config: RunConfig, shape: Shape) -> Iterator[Misfit]:
    split_axes = frozenset(axis for axis, size in shape.items() if size > 1)
    if not combinations.covers(config.parallelism) or not split_axes <= set(AXES):
        return
    schedule = config.options_of("pipeline").get("schedule")
    if problem := combinations.problem(config.parallelism, split_axes, str(schedule) if schedule else None):
        yield Misfit("parallelism", problem)
    if config.dtype == "fp8" and shape["tp"] > 1:
        yield Misfit(
            "dtype", 'is "fp8", whose scales do not support split matrices. Write "bf16", or leave out mesh.tp.'
        )
    if config.dtype != "fp16" and config.options_of(config.parallelism).get("dtype") == "fp16":
        message = 'is "fp16", where small gradients vanish without the loss scale of dtype = "fp16" in [run].'
        yield Misfit(f"{config.parallelism}.dtype", f'{message} Write that, or "bf16" here.')
    if config.compile and shape["tp"] > 1:
        yield Misfit("compile", "does not work with split matrices (torch 2.13). Write false, or leave out mesh.tp.")
    if shape["pp"] > 1 and schedule in SPLIT_BACKWARD:
        yield from _split_backward_problems(config, f"{schedule} runs the backward pass in two halves")


def _split_backward_problems(config: RunConfig, why: str) -> Iterator[Misfit]:
    """Yield settings that torch (2.13) can handle only in an undivided backward pass."""
    if config.compile:
        yield Misfit("compile", f"{why}, which compiled blocks cannot. Write false.")
    if config.recompute == "selective":
        yield Misfit("recompute", f'is "selective", but {why}, for which only "full" can recompute. Write that.')
    if config.options_of("fsdp").get("reshard") == "always":  # with DualPipeV the gradients would be wrong
        yield Misfit("fsdp.reshard", f'is "always", but {why}, for which parameters must stay. Write "auto".')


def dims_of(config: RunConfig) -> Dims | None:
    recipe, options = contracts.recipe(config.recipe), config.recipe_options()
    try:
        return recipe.dims(**options) if recipe.knows_sizes(**options) else None
    except ValueError as error:
        raise Misfit(config.recipe, str(error)) from None


def _with_axis(axis: str) -> str:
    names = [name for name in choices.names("parallel") if axis in axes_of(name)]
    return f'Write parallelism = "{names[0]}", or leave the axis out.' if names else "Leave it out."


def _mesh_misfit(config: RunConfig, world_size: int, given: int) -> Misfit:
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    product = " × ".join(f"{axis} {size}" for axis, size in config.mesh.items())
    own_axes = axes_of(config.parallelism)
    is_complete = all(axis in config.mesh for axis in own_axes)  # so that nothing takes what is left over

    def weight(axis: str) -> tuple[bool, int]:
        size = config.mesh[axis]
        return is_complete and axis in own_axes and world_size % (given // size) == 0, size

    largest = max(config.mesh, key=weight)
    others = given // config.mesh[largest]
    if world_size % others:
        return Misfit("mesh", f"{product} does not fit {ranks}. {nearest_multiples(world_size, given)[:-1]} ranks.")
    fits = nearest_divisors(config.mesh[largest], world_size // others)
    if is_complete:
        alternative = ", or leave it out: it takes what is left over" if largest in own_axes else ""
        fits = f"Write {world_size // others}{alternative}."
    if len(config.mesh) > 1:
        product = f"{product} = {given}"
    return Misfit(f"mesh.{largest}", f"{product} does not divide {ranks}. {fits}")


def _uneven_batch_text(config: RunConfig, shape: Shape, unit: int) -> str:
    count = shape.coordinates
    unit_name = "rank" if count == shape.world_size else "data-parallel coordinate"
    micro = f" × micro batch {config.micro_batch}" if (config.micro_batch or 1) > 1 else ""
    over = f"{count} {unit_name}{'s' * (count > 1)}{micro}"
    return f"{config.global_batch} does not divide over {over}. {nearest_multiples(config.global_batch, unit)}"
