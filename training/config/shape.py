"""How many ranks lie along each axis of the mesh, and whether that can work; checked without torch, before allocation.

    [run]
    parallelism = "fsdp"       # what is done with the ranks that the batch is divided over
    [run.mesh]
    tp = 2                     # two ranks share each matrix; all that are left go to fsdp's own axis, shard

Outermost first: pp, the stages of a pipeline; dp, replicas; shard, replicas that hold a part each; cp, parts of the
context; tp, parts of each matrix. Neighbours on the innermost axis exchange most, so they should share a node.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training import contracts
from training.config import choices, combinations
from training.config.combinations import AXES
from training.config.dims import Dims

if TYPE_CHECKING:
    from training.config.run_config import RunConfig

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
AUTO = "auto"
"""The parallelism that lets training.planning.plan choose one, and the axes that the run leaves open."""
VOCABULARY = "vocabulary"
"""The field of a misfit that lies in the recipe's option of that name."""
DATA_AXES = ("dp", "shard")
"""Along these every rank has samples of its own."""


class Misfit(ValueError):
    """A setting that can't work on these ranks; `field` is its path below [run]."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[type[Misfit], tuple[str, str]]:
        return type(self), (self.field, str(self))


@dataclass(frozen=True)
class Shape(Mapping[str, int]):
    """Axis → ranks along it; an axis that is not there has one."""

    sizes: Mapping[str, int]
    """Outermost first."""
    dims: Dims | None = None
    """The model's, where its recipe tells them."""
    global_batch: int = 1
    micro_batch: int | None = None

    def __getitem__(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def coordinates(self) -> int:
        """Data-parallel coordinates: the global batch is divided over so many."""
        return self["dp"] * self["shard"]

    @property
    def share(self) -> int:
        """Samples of a step at each of them; where they don't divide evenly, at the one that has most."""
        return -(-self.global_batch // self.coordinates)

    def room(self, axis: str) -> int:
        """Ranks that an axis which cuts the model has to divide: those that are left beside the others that cut it."""
        return self.world_size // math.prod(size for other, size in self.items() if other not in (*DATA_AXES, axis))

    def __str__(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in self.sizes.items())


def owners(data: str, axes: Mapping[str, int]) -> dict[str, str]:
    """Axis → the module that works along it: the chosen parallelism's own axes, and those that are given."""
    own = dict.fromkeys(axes_of(data), data)
    others = {axis: name for name in choices.names("parallel") for axis in axes_of(name) if axis not in DATA_AXES}
    return {axis: name for axis, name in {**others, **own}.items() if axis in own or axis in axes}


def axes_of(name: str) -> tuple[str, ...]:
    found = choices.get("parallel", name).constants.get("AXES", ())
    return tuple(found) if isinstance(found, tuple | list) else ()


def modules(config: RunConfig) -> list[str]:
    """The parallelisms of a run in the order in which they are applied: a cut into stages first, the data's last."""
    if config.parallelism == AUTO:
        return []
    found = owners(config.parallelism, config.mesh)
    order = ["pp", *(axis for axis in found if axis not in AXES), "tp", "cp"]
    return [*(found[axis] for axis in order if axis in found and found[axis] != config.parallelism), config.parallelism]


def applied(config: RunConfig, shape: Shape) -> list[str]:
    """Those of `modules` that have something to do: along one rank alone the mesh has no axis."""
    named = modules(config)
    return [name for name in named if name == named[-1] or any(shape[axis] > 1 for axis in axes_of(name))]


def shape_of(config: RunConfig, world_size: int, dims: Dims | None = None) -> Shape:
    """The run's mesh on so many ranks; Misfit with the nearest that works if there is none.

    `dims`: the model's sizes where its data has told the vocabulary; else as the recipe's options give them.
    """
    own = axes_of(config.parallelism)
    for axis in config.mesh:
        if axis in DATA_AXES and axis not in own:
            raise Misfit(f"mesh.{axis}", f"is no axis of {config.parallelism}. {_with_axis(axis)}")
    rest = next((axis for axis in reversed(own) if axis not in config.mesh), None)
    given = math.prod(config.mesh.values())
    if world_size % given or (rest is None and given != world_size):
        raise _uneven(config, world_size, given)
    sizes = {axis: config.mesh.get(axis, 1) for axis in (*own, *config.mesh)}
    if rest is not None:
        sizes[rest] = world_size // given
    order = [*AXES, *(axis for axis in sizes if axis not in AXES)]
    ordered = {axis: sizes[axis] for axis in order if axis in sizes and (sizes[axis] > 1 or axis == own[-1])}
    return Shape(ordered, dims or dims_of(config), config.global_batch, config.micro_batch)


def check(config: RunConfig, world_size: int, dims: Dims | None = None, *, lacking: bool = False) -> Iterator[Misfit]:
    """Everything about the mesh that can't work on so many ranks. `dims`: as for shape_of.

    `lacking`: they are fewer than the run was made for, or came back: shares of the batch may be uneven.
    """
    try:
        shape = shape_of(config, world_size, dims)
    except Misfit as misfit:
        yield misfit
        return
    unit = shape.coordinates * (config.micro_batch or 1)
    if lacking and shape["pp"] == 1:
        if config.global_batch < shape.coordinates:
            message = f"{config.global_batch} samples leave nothing to do for some of {world_size} ranks."
            yield Misfit("global_batch", message)
    elif config.global_batch % shape.coordinates:
        yield Misfit("global_batch", _uneven_batch(config, shape, unit))
    elif config.global_batch % unit:  # a pipeline needs as many micro-batches everywhere
        fits = nearest_divisors(config.micro_batch or 1, shape.share)
        each = "rank" if shape.coordinates == shape.world_size else "data-parallel coordinate"
        yield Misfit("micro_batch", f"{config.micro_batch} does not divide a {each}'s {shape.share} samples. {fits}")
    recipe = contracts.recipe(config.recipe)
    uncombinable = [*recipe.check(config, shape), *_uncombinable(config, shape)]
    yield from uncombinable
    if shape.dims is None and not recipe.knows_sizes(**config.recipe_options()):
        return  # they come with the weights that it starts from: it is checked again there
    for name in applied(config, shape) if not uncombinable else ():
        try:
            contracts.parallelism(name).check(shape, **config.options_of(name))
        except Misfit as misfit:
            yield _of_vocabulary(config, shape) if misfit.field == VOCABULARY else misfit
        except ValueError as error:
            yield Misfit(f"mesh.{axes_of(name)[0]}", str(error))


def _of_vocabulary(config: RunConfig, shape: Shape) -> Misfit:
    """Where it alone does not divide over tp: it may have rows that no token uses, so that the split can stay."""
    assert shape.dims is not None
    rows, tp = shape.dims.vocabulary, shape["tp"]
    if config.recipe_options().get("from_weights", "none") != "none":
        return Misfit("mesh.tp", f"the weights' vocabulary, {rows}, does not divide by {tp}. Leave the axis out.")
    more = f"Write {-(-rows // tp) * tp}: rows that no token uses do no harm."
    return Misfit(f"{config.recipe}.{VOCABULARY}", f"is {rows}, which does not divide by mesh.tp, {tp}. {more}")


def _uncombinable(config: RunConfig, shape: Shape) -> Iterator[Misfit]:
    several = frozenset(axis for axis, size in shape.items() if size > 1)
    if not combinations.knows(config.parallelism) or not several <= set(AXES):
        return
    schedule = config.options_of("pipeline").get("schedule")
    if said := combinations.problem(config.parallelism, several, str(schedule) if schedule else None):
        yield Misfit("parallelism", said)
    if config.dtype == "fp8" and shape["tp"] > 1:
        yield Misfit(
            "dtype", 'is "fp8", whose scales know nothing of split matrices. Write "bf16", or leave out mesh.tp.'
        )
    if config.dtype != "fp16" and config.options_of(config.parallelism).get("dtype") == "fp16":
        message = 'is "fp16", where small gradients vanish without the loss scale of dtype = "fp16" in [run].'
        yield Misfit(f"{config.parallelism}.dtype", f'{message} Write that, or "bf16" here.')
    if config.compile and shape["tp"] > 1:
        yield Misfit("compile", "does not work with split matrices (torch 2.13). Write false, or leave out mesh.tp.")
    if shape["pp"] > 1 and schedule in SPLIT_BACKWARD:
        yield from _unsplittable(config, f"{schedule} runs the backward pass in two halves")


def _unsplittable(config: RunConfig, why: str) -> Iterator[Misfit]:
    """What torch (2.13) does once in a backward pass."""
    if config.compile:
        yield Misfit("compile", f"{why}, which compiled blocks can't. Write false.")
    if config.recompute == "selective":
        yield Misfit("recompute", f'is "selective", but {why}, for which only "full" computes again. Write that.')
    if config.options_of("fsdp").get("reshard") == "always":  # of DualPipeV the gradients would be wrong
        yield Misfit("fsdp.reshard", f'is "always", but {why}, for which parameters must stay. Write "auto".')


@functools.lru_cache(maxsize=1024)
def divisors(of: int) -> tuple[int, ...]:
    """Ascending. A plan asks for the same ones again and again."""
    lower = [number for number in range(1, math.isqrt(of) + 1) if of % number == 0]
    return (*lower, *(of // number for number in reversed(lower) if number * number != of))


def nearest_divisors(wanted: int, of: int) -> str:
    """`Nearest that do: 2 or 4.`"""
    below = max((number for number in divisors(of) if number <= wanted), default=None)
    above = min((number for number in divisors(of) if number > wanted), default=None)
    return _either([number for number in (below, above) if number is not None])


def nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return _either([number for number in (below, below + unit) if number])


def _either(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"The nearest that does: {numbers[0]}."
    return f"Nearest that do: {' or '.join(map(str, numbers))}."


def dims_of(config: RunConfig) -> Dims | None:
    recipe, options = contracts.recipe(config.recipe), config.recipe_options()
    try:
        return recipe.dims(**options) if recipe.knows_sizes(**options) else None
    except ValueError as error:
        raise Misfit(config.recipe, str(error)) from None


def _with_axis(axis: str) -> str:
    names = [name for name in choices.names("parallel") if axis in axes_of(name)]
    return f'Write parallelism = "{names[0]}", or leave the axis out.' if names else "Leave it out."


def _uneven(config: RunConfig, world_size: int, given: int) -> Misfit:
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    product = " × ".join(f"{axis} {size}" for axis, size in config.mesh.items())
    own = axes_of(config.parallelism)
    is_whole = all(axis in config.mesh for axis in own)  # so that nothing takes what is left over

    def weight(axis: str) -> tuple[bool, int]:
        size = config.mesh[axis]
        return is_whole and axis in own and world_size % (given // size) == 0, size

    largest = max(config.mesh, key=weight)
    others = given // config.mesh[largest]
    if world_size % others:
        return Misfit("mesh", f"{product} does not fit {ranks}. {nearest_multiples(world_size, given)[:-1]} ranks.")
    fits = nearest_divisors(config.mesh[largest], world_size // others)
    if is_whole:
        takes = ", or leave it out: it takes what is left over" if largest in own else ""
        fits = f"Write {world_size // others}{takes}."
    if len(config.mesh) > 1:
        product = f"{product} = {given}"
    return Misfit(f"mesh.{largest}", f"{product} does not divide {ranks}. {fits}")


def _uneven_batch(config: RunConfig, shape: Shape, unit: int) -> str:
    count = shape.coordinates
    what = "rank" if count == shape.world_size else "data-parallel coordinate"
    micro = f" × micro batch {config.micro_batch}" if (config.micro_batch or 1) > 1 else ""
    over = f"{count} {what}{'s' * (count > 1)}{micro}"
    return f"{config.global_batch} does not divide over {over}. {nearest_multiples(config.global_batch, unit)}"
